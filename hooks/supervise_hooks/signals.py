"""Hearing signals without acting in handlers: each becomes one byte in a pipe that the listener thread reads.

The byte is written by the interpreter's C handler (`signal.set_wakeup_fd`), so a main thread stuck in a collective does not
delay it (torch 2.13: a Python handler ran 3 s late). What a byte means is decided in `orders`.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_FROM_PYTHON = 0x80
"""Set on bytes written by our Python handler, in case the script has replaced the wakeup descriptor (asyncio does)."""


class SignalTap:
    """Writes the numbers of signals into a pipe, and puts everything back when closed. Handlers found are called on."""

    def __init__(self, numbers: Iterable[int], write_fd: int) -> None:
        """Main thread only. Raises ValueError elsewhere."""
        self._write_fd = write_fd
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        self._mask: dict[int, set[Any]] = {}
        self._wakeup_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        self.numbers = frozenset(numbers)
        for number in self.numbers:
            self._before[number] = signal.signal(number, self._handle)
        self._open = True
        # A forked child shares the pipe: its own SIGTERM would be taken for ours. No signal may come before it is cut off.
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._cut_off)

    def heard(self, byte: int) -> int | None:
        """The signal that a byte of the pipe stands for, if it is one of ours; others' are passed on to their pipe."""
        if self._wakeup_before != -1 and not byte & _FROM_PYTHON:
            try:
                os.write(self._wakeup_before, bytes([byte]))
            except OSError:
                self._wakeup_before = -1  # its owner has closed it
        number = byte & ~_FROM_PYTHON
        return number if number in self.numbers else None

    def close(self) -> None:
        """Put back handlers and descriptor where they are still ours. Outside the main thread nothing can be put back."""
        if not self._open or threading.current_thread() is not threading.main_thread():
            return
        self._open = False
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
        current = signal.set_wakeup_fd(self._wakeup_before)
        if current != self._write_fd:
            signal.set_wakeup_fd(current)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            os.write(self._write_fd, bytes([number | _FROM_PYTHON]))
        except OSError:
            pass  # full: the listener has plenty to read already
        before: Callable[[int, FrameType | None], Any] | Any = self._before.get(number)
        if callable(before):
            before(number, frame)

    def _block(self) -> None:
        if self._open:
            self._mask[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)

    def _unblock(self) -> None:
        mask = self._mask.pop(threading.get_ident(), None)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _cut_off(self) -> None:
        if self._open:
            self.close()  # the forking thread is the child's main thread
            self._open = False
        self._unblock()
