"""How grace is spent, for any amount of it."""

from hypothesis import given
from hypothesis import strategies as st

from supervise_daemon.core.grace import MAX_RESERVE_S, plan_grace

SECONDS = st.floats(0, 1e5)
MEASURED = st.none() | st.floats(0, 1e4)


@given(now=SECONDS, grace_s=st.floats(-100, 1e5), step_s=MEASURED, save_s=MEASURED)
def test_a_plan_stays_between_now_and_the_deadline(
    now: float, grace_s: float, step_s: float | None, save_s: float | None
) -> None:
    """Flush, then stop, then the deadline; and never in the past, not even for a deadline that has passed."""
    plan = plan_grace(now, grace_s, step_s, save_s)
    assert now <= plan.flush_by <= plan.stop_by <= max(now + grace_s, now)
    assert plan.reason


@given(now=SECONDS, one=st.floats(0, 1e4), other=st.floats(0, 1e4), step_s=MEASURED, save_s=MEASURED)
def test_more_grace_never_gives_less_time(
    now: float, one: float, other: float, step_s: float | None, save_s: float | None
) -> None:
    """Monotone in the grace; and what fits in less fits in more."""
    less, more = (plan_grace(now, grace_s, step_s, save_s) for grace_s in sorted((one, other)))
    assert less.flush_by <= more.flush_by and less.stop_by <= more.stop_by
    assert more.fits or not less.fits


@given(grace_s=st.floats(0, 1e5))
def test_nearly_all_of_the_grace_is_for_the_flush(grace_s: float) -> None:
    """At least half of the shortest, all but five seconds of the longest."""
    flush_s = plan_grace(0.0, grace_s, None, None).flush_by
    assert flush_s >= grace_s / 2 and grace_s - flush_s <= MAX_RESERVE_S + 1e-6


@given(grace_s=st.floats(0, 1e3), step_s=st.floats(0, 1e3), save_s=st.floats(0, 1e3))
def test_a_flush_that_does_not_fit_is_called_so(grace_s: float, step_s: float, save_s: float) -> None:
    """Step and save against the time for the flush; unknown costs are given the benefit of the doubt."""
    plan = plan_grace(0.0, grace_s, step_s, save_s)
    assert plan.fits == (step_s + save_s <= plan.flush_by)
    assert plan_grace(0.0, grace_s, None, save_s).fits
