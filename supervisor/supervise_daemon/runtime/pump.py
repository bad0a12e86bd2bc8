"""Copies a job's stdout and stderr to ours and to a log file. Runs as a program of its own, on the standard library alone.

A process apart, so that output has no back-pressure on training and survives the supervisor: whatever goes wrong on the
far side (terminal gone, disk full), reading goes on until every writer is gone. Usage: pump.py LOG OUT_FD ERR_FD
"""

import os
import selectors
import signal
import sys

_CHUNK = 1 << 16


def copy(log_path: str, sources: dict[int, int]) -> None:
    """Read each source until its end, writing to its target descriptor and to the log."""
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        log = -1
    broken: set[int] = set()
    selector = selectors.DefaultSelector()
    for source in sources:
        selector.register(source, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, _CHUNK)
            if not data:
                selector.unregister(key.fd)
                continue
            if log >= 0:
                _write(log, data, dropped_is_fine=True, broken=broken)
            _write(sources[key.fd], data, dropped_is_fine=False, broken=broken)


def _write(fd: int, data: bytes, *, dropped_is_fine: bool, broken: set[int]) -> None:
    """Write what can be written. A full disk may get room again, so the log is retried; a closed terminal is not."""
    if fd in broken:
        return
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError:
            if not dropped_is_fine:
                broken.add(fd)
            return


def main() -> None:
    """Entry point."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # we end when the last writer does, not before
    log_path, out, err = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    copy(log_path, {out: 1, err: 2})


if __name__ == "__main__":
    main()
