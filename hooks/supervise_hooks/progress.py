"""What a rank tells of its progress: pure bookkeeping for the listener thread. The training loop never calls it."""

import msgspec

from supervise_hooks.contract.messages import Activity, Progress

INTERVAL_S = 0.5
"""At most two reports a second."""


class Sight(msgspec.Struct, frozen=True):
    """What the listener thread sees of the session at one moment."""

    step: int
    epoch: int | None
    activity: Activity
    values: dict[str, float]


class Pace:
    """Turns sights into reports: one where something changed, with the recent seconds a step."""

    def __init__(self) -> None:
        self._last: Sight | None = None
        self._moved_at = 0.0
        self._moved_step: int | None = None
        self._step_s: float | None = None

    def report(self, sight: Sight, now: float) -> Progress | None:
        """The message to send, or None when nothing changed since the last one."""
        if self._moved_step is None:
            self._moved_at, self._moved_step = now, sight.step
        elif sight.step > self._moved_step:
            measured = (now - self._moved_at) / (sight.step - self._moved_step)
            self._step_s = measured if self._step_s is None else 0.7 * measured + 0.3 * self._step_s
            self._moved_at, self._moved_step = now, sight.step
        if sight.activity != "training":  # time spent saving or evaluating is no step's
            self._moved_at = now
        if sight == self._last:
            return None
        self._last = sight
        return Progress(step=sight.step, epoch=sight.epoch, activity=sight.activity, step_s=self._step_s, values=sight.values)
