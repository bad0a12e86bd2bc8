"""Which checkpoints may be deleted. Pure; both the daemon and a script alone use it.

The promise: the newest whole checkpoint is never deleted, nor anything while no newer one is proved whole.
"""

import msgspec

from supervise_hooks.contract.manifest import Metric


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How many checkpoints stay."""

    keep_last: int = 3
    """Newest whole ones to keep, at least 1."""
    keep_every: int | None = None
    """Also keep steps divisible by this."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What retention needs to know of one sealed checkpoint."""

    path: str
    step: int
    run_id: str
    whole: bool
    """Proved whole, at least quickly, since it was written."""
    metric: Metric | None = None


def choose_prunable(
    checkpoints: list[Kept], policy: Retention, run_id: str, in_use: frozenset[str] = frozenset()
) -> list[tuple[str, str]]:
    """(path, reason) of each checkpoint that may go, oldest first.

    Never: another run's, one not proved whole, one in `in_use` (an attempt runs from it), the best by metric, the newest.
    """
    ours = sorted((c for c in checkpoints if c.run_id == run_id and c.whole), key=lambda c: c.step)
    keep = {c.path for c in ours[-max(1, policy.keep_last) :]} | in_use
    best = choose_best(ours)
    prunable = []
    for checkpoint in ours:
        kept_by_step = policy.keep_every is not None and checkpoint.step % policy.keep_every == 0
        if checkpoint.path in keep or checkpoint is best or kept_by_step:
            continue
        prunable.append((checkpoint.path, f"step {checkpoint.step} is older than the last {max(1, policy.keep_last)} whole ones"))
    return prunable


def choose_best(checkpoints: list[Kept]) -> Kept | None:
    """The whole checkpoint with the best metric; among equals the newest. NaN is never best."""
    rated = [(c.metric, c) for c in checkpoints if c.whole and c.metric is not None and c.metric.value == c.metric.value]
    if not rated:
        return None
    return max(rated, key=lambda pair: (pair[0].value if pair[0].mode == "max" else -pair[0].value, pair[1].step))[1]
