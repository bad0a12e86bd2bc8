"""What a test session leaves behind on the machine: processes, shared memory, temporary files and sockets.

Everything that the session starts carries its mark in the environment, and gets a temporary folder of the session's
own: what lies in there is ours beyond doubt, also when other sessions run beside. `conftest.py` makes leftovers a failure.
"""

import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil

MARK = "LEAK_MARK_OF_TESTS"
"""Not SUPERVISE_*: tests take those out of the environment of what they start."""
_SHM = Path("/dev/shm")
_TMP = Path("/tmp")
_OURS_IN_TMP = re.compile(r"(supervise-|pymp-|torchelastic_|torch_)")
_CACHES = re.compile(r"torchinductor_|\.?(cache|hypothesis)")
"""Kept on purpose by whoever made them."""
_PATIENCE_S = float(os.environ.get("LEAK_PATIENCE_S", "5"))
"""What is just ending may end."""


class Watch:
    """Remembers what there was at the beginning; `leaks` says what is new and stays."""

    def __init__(self) -> None:
        self.value = secrets.token_hex(8)
        self._began = time.time()
        # Short: paths of sockets end at 108 bytes. Not named like the product's own folders.
        self.temporary = Path(tempfile.mkdtemp(prefix="t-"))
        self._shm, self._tmp = _names(_SHM), _names(_TMP)
        self._environ = Path("/proc/self/environ").read_bytes()
        self._words = _words(os.getpid())

    def begin(self) -> None:
        """Mark the environment of everything that starts from now on."""
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays where pytest's users look for it
        os.environ[MARK] = self.value
        os.environ["TMPDIR"] = str(self.temporary)
        tempfile.tempdir = None

    def leaks(self) -> list[str]:
        """A line for each leftover; left processes are killed, they are the session's own."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._look() and time.monotonic() < deadline:
            time.sleep(0.1)
        found = self._look()
        for process in self._processes():
            process.send_signal(signal.SIGKILL)  # psutil compares start times first: never a stranger
        return found

    def end(self) -> None:
        """Remove the session's temporary folder."""
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _look(self) -> list[str]:
        ours = self._processes()
        processes = [f"left running: pid {process.pid}: {_command(process)[:160]}" for process in ours]
        temporary = [f"left in TMPDIR: {name}" for name in sorted(_names(self.temporary)) if not _CACHES.match(name)]
        shared = [_SHM / name for name in _names(_SHM) - self._shm]
        shared += [_TMP / name for name in _names(_TMP) - self._tmp if _OURS_IN_TMP.match(name)]
        strangers = _in_use({process.pid for process in ours}) if shared else ""
        return [*processes, *temporary, *(f"left: {path}" for path in sorted(shared) if str(path) not in strangers)]

    def _processes(self) -> list[psutil.Process]:
        children = {process.pid for process in psutil.Process().children(recursive=True)}
        return [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and (process.pid in children or self._is_ours(process)) and _is_live(process)
        ]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if f"{MARK}={self.value}".encode() in environ.split(b"\0"):
                return True
            # Forked from this process without exec, it shows our environment as it was when we started, without the mark.
            twin = environ == self._environ and _words(process.pid) == self._words and process.create_time() >= self._began - 1
            # The same command in another terminal may have such children too; an orphan's parent is something else.
            return twin and _words(process.ppid()) != self._words
        except (OSError, psutil.Error):
            return False


def _is_live(process: psutil.Process) -> bool:
    """Not a zombie, and not multiprocessing's tracker, which lives and ends with the session's own process."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in _command(process)
    except psutil.Error:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(gone)"


def _words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _in_use(ours: set[int]) -> str:
    """Paths that other live processes have open, mapped or bound: they are other people's."""
    paths = [] if ours else [Path("/proc/net/unix").read_text()]  # that one does not say whose
    for pid in set(psutil.pids()) - ours:
        try:
            paths.append(Path(f"/proc/{pid}/maps").read_text())
            paths += [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            paths.append(os.readlink(f"/proc/{pid}/cwd"))
        except OSError:
            continue
    return "\n".join(paths)
