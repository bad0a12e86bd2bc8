"""How the time between a notice and its deadline is spent. Pure."""

import msgspec

MIN_RESERVE_S = 0.5
MAX_RESERVE_S = 5.0


class GracePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one notice; times are monotonic seconds."""

    flush_by: float
    """Ranks must have written their receipts by then; what is left is for verifying, stopping and handing back."""
    stop_by: float
    """Every process must be gone by then."""
    fits: bool
    reason: str


def plan_grace(now: float, grace_s: float, step_s: float | None, save_s: float | None) -> GracePlan:
    """Split `grace_s`: a tenth (0.5 to 5 s) stays for verify, stop and requeue, the rest is for the flush.

    `step_s`, `save_s`: measured on this run, None before the first. A flush that will probably not fit is tried all the same:
    the estimate may be wrong, and the last checkpoint stands whatever happens.
    """
    reserve_s = min(max(grace_s / 10, MIN_RESERVE_S), MAX_RESERVE_S, grace_s / 2)
    flush_s = max(grace_s - reserve_s, 0.0)
    plan_times = {"flush_by": now + flush_s, "stop_by": now + max(grace_s - reserve_s / 2, 0.0)}
    if step_s is None or save_s is None:
        return GracePlan(
            **plan_times, fits=True, reason=f"{grace_s:.1f} s of grace, {flush_s:.1f} s for the flush; its cost is not known yet"
        )
    need_s = step_s + save_s
    cost = f"a step takes {step_s:.2f} s and a save {save_s:.2f} s"
    if need_s <= flush_s:
        return GracePlan(**plan_times, fits=True, reason=f"{cost}: fits in the {flush_s:.1f} s for the flush")
    return GracePlan(
        **plan_times,
        fits=False,
        reason=f"{cost}: {need_s:.1f} s do not fit in the {flush_s:.1f} s for the flush; trying, the last checkpoint stands otherwise",
    )
