"""Waiting for something to become true, with a deadline and a message."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, timeout_s: float = 20.0) -> T:
    """The first true value that `look` returns; fails naming `what`, with the last value seen."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}; last seen: {seen!r}"
        time.sleep(0.02)
