"""The two clocks: monotonic for every deadline, wall time only for records."""

import time


class Clock:
    """Replaced by a fake in tests of the loop."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970, for records."""
        return time.time()
