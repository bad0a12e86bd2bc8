"""Who a process is: pid + start time + boot. A pid alone may belong to a stranger tomorrow."""

import os
from pathlib import Path

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of one process, comparable across reboots and pid reuse."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks since boot."""
    boot_id: str
    host: str


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int | None = None) -> ProcessIdentity:
    """Identity of `pid` (default: this process). Raises ProcessLookupError when there is none."""
    pid = os.getpid() if pid is None else pid
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command name may hold spaces and parentheses: fields are counted after the last ')'.
    start_ticks = int(stat.rpartition(")")[2].split()[19])
    return ProcessIdentity(pid, start_ticks, boot_id(), os.uname().nodename)


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly that process still runs on this host. A zombie does not. Of another host it says False: ask there."""
    try:
        return identify(identity.pid) == identity and not _is_zombie(identity.pid)
    except ProcessLookupError:
        return False


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
