"""Copies a job's stdout and stderr to ours and to a log file. Runs as a program of its own, on the standard library alone.

A process apart, so that output has no back-pressure on training and survives the supervisor: whatever goes wrong on the
far side (terminal gone, disk full), reading goes on until every writer is gone. Usage: pump.py LOG OUT_FD ERR_FD
"""

import os
import select
import selectors
import signal
import sys

_CHUNK = 1 << 16
_PIPE_BUF = 4096
"""A pipe that polls writable takes this much without blocking (POSIX)."""
_MAX_HELD = 8 << 20
"""Bytes kept for a terminal or pipe that does not take them; beyond, output is only in the log."""


class Target:
    """One of our own descriptors. Never blocks us: what its reader does not take is held, then left out, and that is said."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.held = bytearray()
        self.broken = False
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Queue output."""
        if self.broken:
            return
        if len(self.held) > _MAX_HELD:
            self._left_out += len(data)
            return
        if self._left_out:
            self.held += f"\n[supervise: {self._left_out} bytes were not taken here; they are in the log]\n".encode()
            self._left_out = 0
        self.held += data

    def push(self, wait_s: float = 0.0) -> None:
        """Write what can be written now, waiting at most `wait_s` for the reader."""
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        while self.held and not self.broken and poller.poll(wait_s * 1000):
            try:
                del self.held[: os.write(self.fd, self.held[:_PIPE_BUF])]
            except OSError:
                self.broken = True  # a closed terminal does not come back


def copy(log_path: str, sources: dict[int, int]) -> None:
    """Read each source until its end, writing to its target descriptor and to the log."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        log = -1
    targets = {source: Target(fd) for source, fd in sources.items()}
    selector = selectors.DefaultSelector()
    for source in sources:
        selector.register(source, selectors.EVENT_READ)
    while selector.get_map():
        waiting = any(target.held and not target.broken for target in targets.values())
        for key, _ in selector.select(0.05 if waiting else None):
            data = os.read(key.fd, _CHUNK)
            if not data:
                selector.unregister(key.fd)
                continue
            _write_log(log, data)
            targets[key.fd].add(data)
        for target in targets.values():
            target.push()
    for target in targets.values():
        target.push(wait_s=1.0)


def _write_log(log: int, data: bytes) -> None:
    """A full disk costs these lines; it may get room again, so the next ones are tried."""
    view = memoryview(data)
    while view and log >= 0:
        try:
            view = view[os.write(log, view) :]
        except OSError:
            return


def main() -> None:
    """Entry point."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # we end when the last writer does, not before
    log_path, out, err = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    copy(log_path, {out: 1, err: 2})


if __name__ == "__main__":
    main()
