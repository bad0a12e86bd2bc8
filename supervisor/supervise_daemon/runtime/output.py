"""Output of an attempt: two pipes, a pump process, a log file. Restarts the pump if somebody kills it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from supervise_daemon.runtime import pump

TAIL_BYTES = 256 << 10


class Output:
    """Owns the read ends, so that ranks never see a broken pipe; give `stdout` and `stderr` to the leader, then `started()`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.drained = threading.Event()
        """Set when the pump has seen the end of both pipes."""
        self.pid: int | None = None
        self._out_read, self.stdout = os.pipe2(os.O_CLOEXEC)
        self._err_read, self.stderr = os.pipe2(os.O_CLOEXEC)

    def start(self) -> int:
        """Start the pump; returns its pid. Raises OSError."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", pump.__file__, str(self.log), str(self._out_read), str(self._err_read)],
            stdin=subprocess.DEVNULL,
            pass_fds=(self._out_read, self._err_read),
            start_new_session=True,
        )
        process.returncode = 0  # reaped by the loop
        self.pid = process.pid
        return process.pid

    def close_write_ends(self) -> None:
        """Called once the leader has its own copies: from then on the pipes end when the tree does."""
        os.close(self.stdout)
        os.close(self.stderr)

    def ended(self, returncode: int) -> int | None:
        """The pump was reaped. A pump that was killed is started again (its new pid is returned); nothing it had not read is lost."""
        if returncode == 0:
            os.close(self._out_read)
            os.close(self._err_read)
            self.pid = None
            self.drained.set()
            return None
        return self.start()

    def tail(self) -> str:
        """The last 256 KiB of the log; empty when it cannot be read."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""
