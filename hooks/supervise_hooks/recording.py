"""What is recorded of one moment of the training, and how its save is told. When to save is decided in `session`.

Files are written by `saving` and the `TrainingState`.
"""

from typing import Any

import msgspec

from supervise_hooks import saving, summary
from supervise_hooks.contract import messages
from supervise_hooks.contract.manifest import Metric, Reason
from supervise_hooks.setup import Setup
from supervise_hooks.state import SaveContext, TrainingState

_PRIVATE = "supervise."
"""Names of our own among the values of a checkpoint."""
_EVALUATING = _PRIVATE + "evaluating"
_BEST = _PRIVATE + "best"


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The training at one boundary."""

    step: int
    epoch: int | None
    reason: Reason
    values: dict[str, Any]
    """Latest logged values."""
    evaluating: bool
    rng: Any
    """Random state captured when the evaluation was entered; None outside of one."""


class Recorder:
    """Saves moments, and keeps what it must remember between them: the best metric and the last save."""

    def __init__(self, state: TrainingState, setup: Setup, teller: summary.Teller) -> None:
        self._state = state
        self._setup = setup
        self._teller = teller
        self.saved: messages.Saved | None = None
        """The last save that succeeded in this attempt."""
        self.best: Metric | None = self._restored_best()

    def restored_values(self) -> dict[str, Any]:
        """Logged values as they were in the checkpoint training started from."""
        loaded = self._setup.start.loaded
        values = {} if loaded is None else loaded.values
        return {name: value for name, value in values.items() if not name.startswith(_PRIVATE)}

    def evaluation_interrupted(self) -> bool:
        """Whether that checkpoint was saved inside an evaluation."""
        loaded = self._setup.start.loaded
        return loaded is not None and loaded.values.get(_EVALUATING) == 1.0

    def write(self, moment: Moment, prune: bool) -> messages.Saved | messages.SaveFailed:
        """Save, unless this step is saved already. Never raises: a failure is told and returned."""
        if self.saved is not None and self.saved.step == moment.step:
            return self.saved
        try:
            return self._written(self._context(moment), prune)
        except Exception as error:  # noqa: BLE001  whatever the disk or a state_dict does, the training must go on
            self._teller.trouble(f"cannot save step {moment.step}: {error}; the previous checkpoint stands", error)
            return messages.SaveFailed(flush_id=0, step=moment.step, error=f"{type(error).__name__}: {error}"[:2000])

    def _written(self, context: SaveContext, prune: bool) -> messages.Saved:
        written = saving.save(self._state, self._setup.place, context)
        self.saved = messages.Saved(
            flush_id=0,
            step=context.step,
            path=str(written.path),
            size=written.size,
            seconds=written.seconds,
            metric=context.metric,
        )
        logged = {name: value for name, value in context.values.items() if not name.startswith(_PRIVATE)}
        facts: dict[str, Any] = {"epoch": context.epoch, "step": context.step, "size": written.size, "seconds": written.seconds}
        facts["values"] = summary.shown_values(logged, self._state.rates())
        self._teller.news(summary.checkpoint_line(f"saved ({context.reason})", str(written.path), facts))
        if written.sealed:
            saving.after_seal(self._setup.place, self._setup.run_id, prune, self._teller)
        return self.saved

    def _context(self, moment: Moment) -> SaveContext:
        setup = self._setup
        values = summary.finite(moment.values)
        metric = self._metric(values)
        if self.best is not None:
            values[_BEST] = self.best.value
        if moment.evaluating:
            values[_EVALUATING] = 1.0
        return SaveContext(
            run_id=setup.run_id,
            attempt=setup.attempt,
            rank=setup.rank,
            world_size=setup.world_size,
            step=moment.step,
            epoch=moment.epoch,
            reason=moment.reason,
            metric=metric,
            values=values,
            config=setup.config,
            rng=moment.rng,
        )

    def _metric(self, values: dict[str, float]) -> Metric | None:
        if self._setup.metric is None or self._setup.metric[0] not in values:
            return None
        name, mode = self._setup.metric
        metric = Metric(name, values[name], "max" if mode == "max" else "min")
        if self.best is None or (metric.value > self.best.value if mode == "max" else metric.value < self.best.value):
            self.best = metric
        return metric

    def _restored_best(self) -> Metric | None:
        loaded, metric = self._setup.start.loaded, self._setup.metric
        if loaded is None or metric is None:
            return None
        if _BEST not in loaded.values:
            return loaded.best
        return Metric(metric[0], loaded.values[_BEST], "max" if metric[1] == "max" else "min")
