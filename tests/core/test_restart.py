"""Whether, when and from where a crashed job is launched again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.builders import a_crash
from supervise_daemon.core.restart import Crash, GiveUp, Relaunch, RestartPolicy, decide_restart

CRASHES = st.lists(
    st.builds(
        Crash,
        at=st.floats(0, 1e6),
        signature=st.sampled_from(["1:a", "1:b", "137:"]),
        step=st.none() | st.integers(0, 3),
        resumed_from=st.none() | st.sampled_from(["step-1", "step-2"]),
        started_training=st.booleans(),
        newest_step=st.none() | st.integers(0, 3),
        killed=st.booleans(),
    ),
    min_size=1,
    max_size=12,
).map(lambda crashes: tuple(sorted(crashes, key=lambda crash: crash.at)))
POLICIES = st.builds(
    RestartPolicy,
    max_crashes=st.integers(0, 12),
    window_s=st.floats(1, 1e6),
    backoff_first_s=st.floats(0, 10),
    backoff_max_s=st.floats(10, 300),
    same_failure_limit=st.integers(2, 4),
)
JITTER = st.floats(0, 1)


@given(crashes=CRASHES, policy=POLICIES, jitter=JITTER)
def test_a_decision_is_bounded_and_gives_its_reason(crashes: tuple[Crash, ...], policy: RestartPolicy, jitter: float) -> None:
    """No launch beyond the budget of the window; a pause between the first and the longest backoff, spread by a quarter at most."""
    recent = [crash for crash in crashes if crashes[-1].at - crash.at <= policy.window_s]
    decision = decide_restart(crashes, policy, jitter)
    assert decision.reason
    if len(recent) > policy.max_crashes:
        assert isinstance(decision, GiveUp)
    if isinstance(decision, Relaunch):
        assert policy.backoff_first_s <= decision.delay_s <= policy.backoff_max_s * 1.25


@given(crashes=CRASHES, policy=POLICIES, jitter=JITTER)
def test_a_checkpoint_is_set_aside_only_for_a_streak_of_equal_failures(
    crashes: tuple[Crash, ...], policy: RestartPolicy, jitter: float
) -> None:
    """It is the one that all of them started from, they all failed alike at one step after starting, and nobody killed them."""
    decision = decide_restart(crashes, policy, jitter)
    if isinstance(decision, Relaunch) and decision.set_aside is not None:
        tail = crashes[-policy.same_failure_limit :]
        assert len(tail) == policy.same_failure_limit
        assert {crash.resumed_from for crash in tail} == {decision.set_aside}
        assert len({(crash.signature, crash.step) for crash in tail}) == 1
        assert tail[-1].started_training and tail[-1].step is not None and not tail[-1].killed


@given(crash=CRASHES.map(lambda crashes: crashes[-1]), policy=POLICIES)
def test_the_pause_never_shrinks_without_progress(crash: Crash, policy: RestartPolicy) -> None:
    """The same crash again and again: each pause is at least the one before, until the job is given up; and it is."""
    pauses: list[float] = []
    for count in range(1, policy.max_crashes + 2):
        decision = decide_restart((crash,) * count, policy, 0.0)
        if isinstance(decision, GiveUp):
            break
        pauses.append(decision.delay_s)
    else:
        pytest.fail("launched for ever")
    assert pauses == sorted(pauses) and len(pauses) <= policy.max_crashes


@pytest.mark.parametrize("signature", ["1:ImportError: x", "2:usage", "1:FileNotFoundError: data"])
def test_a_start_that_fails_identically_is_tried_once_more(signature: str) -> None:
    """Import error, bad flag, missing file: the second equal failure before the first step is the last (case C51)."""
    crash = a_crash(signature=signature, step=None, started_training=False)
    assert isinstance(decide_restart((crash,), RestartPolicy(), 0.0), Relaunch)
    assert isinstance(decide_restart((crash, crash), RestartPolicy(), 0.0), GiveUp)


def test_different_failures_at_the_start_are_tried_within_the_budget() -> None:
    """A port that is taken, then a slow disk: not the same trouble."""
    first, second = (a_crash(signature=f"1:{what}", step=None, started_training=False) for what in "ab")
    assert isinstance(decide_restart((first, second), RestartPolicy(), 0.0), Relaunch)


def test_a_job_that_always_dies_at_one_step_from_a_fresh_start_is_given_up() -> None:
    """There is nothing to walk back to (case C52)."""
    assert isinstance(decide_restart((a_crash(step=3),) * 2, RestartPolicy(), 0.0), GiveUp)


def test_crashes_outside_the_window_are_forgiven() -> None:
    """A crash a week is no reason to give up."""
    week = 7 * 86_400.0
    crashes = tuple(a_crash(at=number * week, step=number) for number in range(50))
    assert isinstance(decide_restart(crashes, RestartPolicy(max_crashes=1), 0.0), Relaunch)


def test_progress_resets_the_pause_but_not_the_budget() -> None:
    """A newer whole checkpoint makes the pause short again; crashes still count (case C53)."""
    policy = RestartPolicy(max_crashes=3)
    stuck = tuple(a_crash(step=step, newest_step=3) for step in (4, 5, 6))
    moved = (*stuck[:2], a_crash(step=9, newest_step=8))
    stuck_again, moved_on = (decide_restart(crashes, policy, 0.0) for crashes in (stuck, moved))
    assert isinstance(stuck_again, Relaunch) and isinstance(moved_on, Relaunch)
    assert (stuck_again.delay_s, moved_on.delay_s) == (4.0, 1.0)
    assert isinstance(decide_restart((*moved, a_crash(step=19, newest_step=18)), policy, 0.0), GiveUp)


def test_a_poisoned_checkpoint_is_walked_back_from_step_by_step() -> None:
    """Two deaths from step-30, two from step-20, then a fresh start that dies as well: given up (case C54)."""
    story: list[Crash] = []
    asides = []
    for start in ("step-30", "step-30", "step-20", "step-20", None, None):
        story.append(a_crash(step=33, resumed_from=start, newest_step=30))
        decision = decide_restart(tuple(story), RestartPolicy(), 0.0)
        asides.append(decision.set_aside if isinstance(decision, Relaunch) else "given up")
    assert asides == [None, "step-30", None, "step-20", None, "given up"]


def test_kills_from_outside_are_no_streak() -> None:
    """The OOM killer at the same step twice sets nothing aside and gives nothing up before the budget does."""
    killed = a_crash(signature="137:killed by SIGKILL", resumed_from="step-3", killed=True)
    decision = decide_restart((killed,) * 5, RestartPolicy(), 0.0)
    assert isinstance(decision, Relaunch) and decision.set_aside is None
    assert isinstance(decide_restart((killed,) * 11, RestartPolicy(), 0.0), GiveUp)
