"""Signals as bytes on a pipe: the C-level handler writes one byte, the loop reads it. No work in handlers, ever."""

import os
import signal
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Self


class SignalInbox:
    """While entered, the given signals arrive on `fd` instead of acting. Main thread only."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old: dict[int, object] = {}
        self._old_wakeup = -1

    @property
    def fd(self) -> int:
        """Readable when a signal has come."""
        return self._read

    def __enter__(self) -> Self:
        # A full pipe means the loop already has plenty to read: losing a byte then loses nothing but a repetition.
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self.numbers:
            self._old[number] = signal.signal(number, _heard)
        # A parent may have blocked them for its own purposes; blocked signals would never reach the pipe.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.numbers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._read)
        os.close(self._write)

    def read(self) -> list[int]:
        """Signal numbers since the last call, in order of arrival."""
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []


def _heard(number: int, frame: FrameType | None) -> None:
    """Python insists on a handler; the byte is already in the pipe."""


def is_ignored(number: int) -> bool:
    """Whether whoever started us ignores this signal (nohup does so with SIGHUP): then so do we."""
    return signal.getsignal(number) is signal.SIG_IGN
