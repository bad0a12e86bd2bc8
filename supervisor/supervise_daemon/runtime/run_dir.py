"""The run directory `.supervise/<name>/` and the lock that makes one supervisor its owner. Also the private directory for sockets.

lock              flock, held while a supervisor lives; its content says who
journal.jsonl     every event and decision; the memory of the run
status.json       replaced at each change
attempts/0001/    output.log, error.json
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from supervise_hooks.contract.errors import SuperviseError
from supervise_hooks.contract.identity import ProcessIdentity, identify, is_alive


class AlreadyRunning(SuperviseError):
    """Another supervisor owns this run."""


class RunDir:
    """Paths of one run, and its lock."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.journal = self.path / "journal.jsonl"
        self.status = self.path / "status.json"
        self._lock_fd: int | None = None

    def attempt_dir(self, attempt: int) -> Path:
        """Folder of an attempt's output, created."""
        path = self.path / "attempts" / f"{attempt:04d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def owner_key(self) -> str:
        """Names this run directory on this machine, wherever it is mounted: goes into the names of private directories."""
        info = os.stat(self.path)
        return f"{os.getuid()}-{info.st_dev:x}-{info.st_ino:x}"

    def highest_attempt(self) -> int:
        """The highest attempt that left a folder: counters never go down, even when the journal is lost."""
        try:
            return max((int(entry) for entry in os.listdir(self.path / "attempts") if entry.isdigit()), default=0)
        except FileNotFoundError:
            return 0

    def acquire(self) -> None:
        """Become the owner, or raise AlreadyRunning saying who is. The lock dies with us: a leftover file is no obstacle."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SuperviseError(
                f"cannot use run directory {self.path}: {error.strerror}; pass --run-root to put it elsewhere"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 4096, 0)
            os.close(fd)
            raise AlreadyRunning(
                f"cannot supervise {self.path.name!r}: {_who(owner)} already does; see `supervise status {self.path.name}`"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            self._acquire_without_flock(fd)
        content = msgspec.json.encode(identify())
        os.ftruncate(fd, 0)
        os.pwrite(fd, content, 0)
        self._lock_fd = fd

    def _acquire_without_flock(self, fd: int) -> None:
        """Filesystems without locks (some NFS): believe the recorded owner if it is provably alive."""
        content = os.pread(fd, 4096, 0)
        try:
            owner = msgspec.json.decode(content, type=ProcessIdentity) if content else None
        except msgspec.MsgspecError:
            owner = None
        if owner is not None and is_alive(owner):
            os.close(fd)
            raise AlreadyRunning(f"cannot supervise {self.path.name!r}: {_who(content)} already does")

    def release(self) -> None:
        """Give the lock back."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _who(content: bytes) -> str:
    try:
        owner = msgspec.json.decode(content, type=ProcessIdentity)
    except msgspec.MsgspecError:
        return "another supervisor"
    return f"pid {owner.pid} on {owner.host}"


def make_private_dir(owner: str) -> Path:
    """A new 0700 directory on a local disk: sockets have a path limit of 108 bytes and do not work on NFS."""
    for base in _bases():
        if len(base) < 50 and os.access(base, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=_prefix(owner), dir=base))
    raise SuperviseError("cannot make a private directory for sockets: neither $XDG_RUNTIME_DIR, $TMPDIR nor /tmp is writable")


def sweep_private_dirs(owner: str, keep: Path) -> None:
    """Remove those that supervisors of this run left when they were killed. Call it as the run's owner, its old tree gone."""
    for base in _bases():
        with contextlib.suppress(OSError):  # no such base, or not ours to read
            for name in os.listdir(base):
                if name.startswith(_prefix(owner)) and Path(base, name) != keep:
                    remove_private_dir(Path(base, name))


def remove_private_dir(path: Path) -> None:
    """Remove it if it is provably one of ours: our prefix, our uid, a real directory."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if path.name.startswith("supervise-") and info.st_uid == os.getuid() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def _prefix(owner: str) -> str:
    return f"supervise-{owner}-"


def _bases() -> list[str]:
    bases = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")  # noqa: S108 - mkdtemp makes it private
    return list(dict.fromkeys(base for base in bases if base))
