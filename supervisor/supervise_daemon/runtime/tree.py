"""The tree of an attempt: spawn the leader, adopt and reap orphans, list and kill everything. Linux only.

torchrun puts each rank in a session of its own, so a process group is not the job: we are a child subreaper and the
kernel hands us every orphan. Members are found by descent; those of an earlier supervisor by their marker.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from supervise_hooks.contract import env

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans of our descendants are reparented to us instead of init. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


class Tree:
    """Processes we started, except our own servants (the output pump)."""

    def __init__(self) -> None:
        self.leader: int | None = None
        self.servants: set[int] = set()

    def spawn(self, argv: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> int:
        """Start the leader in a session of its own, so that signals to our group pass it by. Raises OSError."""
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=None if not os.isatty(0) else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        process.returncode = 0  # reaped by `reap`, not by Popen: keeps its destructor quiet
        self.leader = process.pid
        return process.pid

    def reap(self) -> list[tuple[int, int]]:
        """(pid, return code as Popen has it) of every child that has ended, adopted ones included."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            self.servants.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))

    def members(self) -> list[psutil.Process]:
        """Every live process of the tree; zombies are not alive."""
        members = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.pid not in self.servants and process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except psutil.NoSuchProcess:
                continue
        return members

    def signal_members(self, number: int) -> list[int]:
        """Send a signal to every member; returns the pids. Launchers that respawn ranks must go first: see `kill`."""
        return [process.pid for process in self.members() if _send(process, number)]

    def kill(self) -> list[int]:
        """SIGKILL the leader first, so that it cannot respawn ranks, then whoever is left, until a look finds nobody new."""
        killed: list[int] = []
        for process in sorted(self.members(), key=lambda process: process.pid != self.leader):
            if _send(process, signal.SIGKILL):
                killed.append(process.pid)
        for _ in range(8):  # a fork may have been under way; each look catches one generation
            late = [process for process in self.members() if process.pid not in killed]
            if not late:
                break
            killed += [process.pid for process in late if _send(process, signal.SIGKILL)]
        return killed


def _send(process: psutil.Process, number: int) -> bool:
    try:
        process.send_signal(number)  # psutil compares the start time first: never a stranger with a reused pid
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return True


def find_carrying(*words: str) -> list[psutil.Process]:
    """Live processes of this user whose environment holds any of these `NAME=value` words, whoever their parent is.

    We and our ancestors are never among them: a supervisor may be started from a shell that an old job left.
    """
    wanted = {word.encode() for word in words}
    ours = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    found = []
    for pid in psutil.pids():
        try:
            if pid not in ours and not wanted.isdisjoint(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def find_marked(marker: str) -> list[psutil.Process]:
    """Live processes of one attempt."""
    return find_carrying(f"{env.MARKER}={marker}")


def kill_carrying(*words: str) -> list[psutil.Process]:
    """SIGKILL every process `find_carrying` finds; returns those that were still there afterwards."""
    for _ in range(8):
        left = find_carrying(*words)
        for process in left:
            _send(process, signal.SIGKILL)
        _, alive = psutil.wait_procs(left, timeout=1.0)
        if not alive and not find_carrying(*words):
            return []
    return find_carrying(*words)
