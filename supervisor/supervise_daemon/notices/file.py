"""A notice by file: whoever creates the file says that the machine will be taken. Its first line may name seconds of grace.

Creating it is a preemption; while it stays, the notice is not repeated; removing it arms the source again.
"""

import os
import re
from pathlib import Path

from supervise_daemon.core.events import NoticeArrived

_GRACE = re.compile(r"\s*(\d{1,7}(?:\.\d+)?)\s*s?\s*")


class FileNotice:
    """Polls one path."""

    name = "file"

    def __init__(self, path: Path, grace_s: float, poll_s: float = 1.0) -> None:
        self.path = path
        self.poll_s = poll_s
        self._grace_s = grace_s
        # A file left by an earlier machine's end must not end this attempt before it begins: only a new one counts.
        self._seen = self._stamp()

    def _stamp(self) -> tuple[int, int] | None:
        try:
            info = self.path.stat()
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns

    def poll(self) -> NoticeArrived | None:
        """A notice when the file is new or has been written again."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        if stamp is None:
            return None
        return NoticeArrived(source=f"file {self.path}", action="preempt", grace_s=parse_grace(self._first_line(), self._grace_s))

    def _first_line(self) -> str:
        try:
            # NONBLOCK: a FIFO in its place must not hang the loop.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, errors="replace") as file:
                return file.readline(64)
        except OSError:
            return ""


def parse_grace(line: str, default_s: float) -> float:
    """Seconds named by the file's first line, else the default. Pure."""
    match = _GRACE.fullmatch(line)
    return float(match[1]) if match else default_s
