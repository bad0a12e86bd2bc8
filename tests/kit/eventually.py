"""Waiting for something to become true, with a deadline and a good message."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], *, what: str, timeout_s: float = 20.0) -> T:
    """The first true value of `check`; AssertionError naming `what` when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}; last seen: {value!r}"
        time.sleep(0.01)
