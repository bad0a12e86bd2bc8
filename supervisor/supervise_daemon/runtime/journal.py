"""The journal: one JSON object a line, appended and fsynced. Every event and decision with its reason; the memory of the run.

A torn last line (crash, full disk) or foreign bytes cost that line only. A disk that refuses is reported once and never
stops the supervisor: the job matters more than its diary.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from supervise_daemon.core.restart import Crash
from supervise_daemon.runtime.scribe import Scribe


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a new supervisor of the same run must know of the earlier ones."""

    attempt: int = 0
    crashes: tuple[Crash, ...] = ()
    preemptions: int = 0
    ever_whole: bool = False
    """A checkpoint of this run was once proved whole."""
    checkpoints: str | None = None
    """Folder the ranks said they save to."""
    marker: str | None = None
    """Of the newest attempt."""
    set_aside: str | None = None


class Journal:
    """Append-only record in a run directory."""

    def __init__(self, path: Path, complain: Callable[[str], None], scribe: Scribe) -> None:
        self.path = path
        self._scribe = scribe
        self._complain = complain
        self._complained = False
        self._fd: int | None = None

    def append(self, kind: str, wall: float, **fields: Any) -> None:
        """Add a line: encoded now, written by the scribe; durable after `sync`, unless the disk refused."""
        line = msgspec.json.encode({"at": round(wall, 3), "kind": kind} | fields) + b"\n"
        self._scribe.write(lambda: self._write(line))

    def _write(self, line: bytes) -> None:
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                if os.fstat(self._fd).st_size and not self._ends_with_newline():
                    line = b"\n" + line  # after a torn line
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(self._fd)
        except OSError as error:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            if not self._complained:
                self._complained = True
                self._complain(f"cannot write {self.path}: {error.strerror}; going on without a journal")

    def _ends_with_newline(self) -> bool:
        with open(self.path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def remember(self, memory: Memory, wall: float) -> None:
        """Record the memory, durable when this returns; the last one counts."""
        self.append("memory", wall, memory=memory)
        self._scribe.sync()

    def recall(self) -> Memory:
        """The last readable memory; counters of an empty or lost journal start anew."""
        memory = Memory()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return memory
        for line in reversed(content.split(b"\n")):
            if b'"memory"' not in line:
                continue
            try:
                record = json.loads(line)
                if record["kind"] == "memory":
                    return msgspec.convert(record["memory"], Memory)
            except (ValueError, KeyError, TypeError, msgspec.ValidationError):
                continue
        return memory
