"""One integer that the training loop compares at each step boundary, lowered by other threads. The whole hot path.

Boundary b is the state after b completed steps. Why a thread's promise is always kept by the loop is told at `Gate`;
what is promised, and to whom, is in `agreement`.
"""

import sys
import threading

NEVER = sys.maxsize


class Gate:
    """Where the loop must stop next.

    At boundary b the loop does, in this order and without a lock: `next_check = b + 1`, then compare `at` with b.
    A promising thread does: read g = next_check, write at = g, read next_check again. If it is still <= g, then the loop
    has not begun its check of boundary g, so its coming read of `at` sees g: the loop will stop there. Otherwise the loop
    may have slipped through, and the promise is tried again one boundary later. (Dekker's argument; it needs that a write
    is seen by reads that come later, which the GIL gives.) Swapping the loop's two accesses breaks it; a test plants that bug.

    `at` has two sources, what is scheduled and what is promised, so that neither overwrites the other; only `at` is read
    without the lock. While the loop is parked (set-up, evaluation) `next_check` stands at the boundary it is parked on:
    it can still stop there, at a service point or when it goes on.
    """

    __slots__ = ("_lock", "_promised", "_scheduled", "at", "next_check")

    def __init__(self, boundary: int = 0) -> None:
        self.next_check = boundary
        self.at = NEVER
        self._scheduled = NEVER
        self._promised = NEVER
        self._lock = threading.Lock()

    def promise(self) -> int:
        """A boundary at which the loop is certain to stop, from any thread. It holds until `aim`."""
        with self._lock:
            while True:
                boundary = self.next_check
                self._promised = boundary
                self.at = min(self._scheduled, boundary)
                if self.next_check <= boundary:
                    return boundary

    def aim(self, boundary: int = NEVER) -> None:
        """Replace the promise by the common boundary, or by none."""
        with self._lock:
            self._promised = boundary
            self.at = min(self._scheduled, boundary)

    def schedule(self, boundary: int = NEVER) -> None:
        """Where the loop stops for its own reasons, e.g. the next periodic save. Called by the loop's thread."""
        with self._lock:
            self._scheduled = boundary
            self.at = min(boundary, self._promised)
