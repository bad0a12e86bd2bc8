"""The seam between the session (when to save) and an integration (what to save). No torch here.

`integrations.torch.TorchState` is the one implementation today; `testing` has a tiny one for tests of the session.
"""

from pathlib import Path
from typing import Any, Protocol

import msgspec

from supervise_hooks.contract.manifest import Metric, Reason, Receipt


class SaveContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one save that the training objects do not know themselves."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    step: int
    """Completed steps; the state is the one at this boundary."""
    epoch: int | None
    reason: Reason
    metric: Metric | None = None
    values: dict[str, float] = {}
    """Latest `run.log(...)` values, for the record."""
    config: dict[str, Any] | None = None
    """The user's own configuration, compared on resume."""
    rng: Any = None
    """Random state captured at the boundary when that lies behind us (saving from inside an evaluation)."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself after it was loaded."""

    step: int
    epoch: int | None
    world_size: int
    best: Metric | None
    values: dict[str, float]
    config: dict[str, Any] | None
    size: int
    """Bytes read, about."""
    notes: tuple[str, ...] = ()
    """Things the user should know, e.g. random state of another world size was not restored."""


class TrainingState(Protocol):
    """What can be saved and restored at a step boundary."""

    def save(self, folder: Path, context: SaveContext) -> Receipt:
        """Write this rank's part into `folder` (created if missing), durably, then its receipt. Never seals.

        No collectives, no waiting for peers. Raises CheckpointError; on failure its own files are gone again.
        """

    def load(self, folder: Path) -> Loaded:
        """Restore everything except random state. No collectives. Raises CheckpointError; nothing is half-loaded on a key mismatch."""

    def restore_rng(self) -> None:
        """Apply the random state of the last `load`, once; a no-op otherwise. Called just before the first step."""

    def capture_rng(self) -> Any:
        """This rank's random state now; pass to `apply_rng` or `SaveContext.rng`."""

    def apply_rng(self, rng: Any) -> None:
        """Put back what `capture_rng` gave."""

    def rates(self) -> dict[str, float]:
        """Learning rate for the summary line, e.g. {"lr": 0.001}."""

    def estimated_bytes(self) -> int:
        """About how many bytes this rank's next `save` will write, for the free-space check."""
