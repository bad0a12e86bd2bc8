"""What the end of an attempt means, and with which code it comes out."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.builders import Story, a_notice
from supervise_daemon.core import events, exits
from supervise_daemon.core.restart import FailureReport, RestartPolicy

REPORTS = st.builds(
    FailureReport,
    exit_code=st.integers(0, 255),
    rank=st.none() | st.integers(0, 3),
    error=st.sampled_from(["", "ValueError: x"]),
    step=st.none() | st.integers(0, 9),
)
ENDS = st.builds(
    exits.AttemptEnd,
    leader_code=st.integers(-64, 255),
    pending=st.sampled_from([None, "preempt", "stop"]),
    flushed=st.booleans(),
    all_completed=st.booleans(),
    report=st.none() | REPORTS,
)


@given(end=ENDS)
def test_only_exit_code_0_can_be_finished(end: exits.AttemptEnd) -> None:
    """And a notice that was pending is finished only when every rank had completed."""
    ending, why = exits.classify_exit(end)
    assert why
    if ending == "finished":
        assert end.leader_code == 0 and (end.all_completed or end.pending is None)
    else:
        assert ending == {"stop": "stopped", "preempt": "preempted", None: "crashed"}[end.pending]


def test_a_wrapper_that_swallows_a_failure_does_not_make_it_a_success() -> None:
    """C49: a rank told of its exception, the shell around it went on and exited 0: crashed. A quiet exit 0 is finished."""
    end = exits.AttemptEnd(leader_code=0, pending=None, flushed=False, all_completed=False, report=None, rank_failed=True)
    assert exits.classify_exit(end)[0] == "crashed"
    assert exits.classify_exit(msgspec.structs.replace(end, rank_failed=False))[0] == "finished"
    assert exits.classify_exit(msgspec.structs.replace(end, all_completed=True))[0] == "finished"


@given(first=st.none() | REPORTS, reports=st.lists(REPORTS, max_size=4).map(tuple), leader_code=st.integers(-64, 255))
def test_the_first_to_fall_is_the_one_we_saw(
    first: FailureReport | None, reports: tuple[FailureReport, ...], leader_code: int
) -> None:
    """Its code is what the launcher saw of it; what we know is never lost; the code that comes out is never 0."""
    merged = exits.merge_reports(first, reports, leader_code)
    assert (merged is None) == (first is None and not reports)
    assert 1 <= exits.final_code(leader_code, merged) <= 255
    if merged is None or first is None:
        assert merged is None or merged == reports[0]
        return
    assert merged.rank == first.rank
    assert merged.error == first.error or not first.error
    assert merged.step == first.step or first.step is None
    told = [report.exit_code for report in reports if report.rank == first.rank]
    if told:
        assert merged.exit_code == told[0]
    elif first.exit_code:
        assert merged.exit_code == first.exit_code


def test_a_victim_that_the_launcher_calls_the_root_cause_is_not_blamed() -> None:
    """Rank 1 was killed, rank 0 died of it within one poll and is printed first; the account is rank 1's."""
    seen = FailureReport(exit_code=0, rank=1, step=7)
    told = (
        FailureReport(exit_code=1, rank=0, error="peer closed"),
        FailureReport(exit_code=137, rank=1, error="killed by SIGKILL"),
    )
    assert exits.merge_reports(seen, told, 1) == FailureReport(exit_code=137, rank=1, error="killed by SIGKILL", step=7)


@pytest.mark.parametrize(("leader_code", "code"), [(7, 7), (-9, 137), (-15, 143)])
def test_the_code_of_a_rank_that_is_the_leader_is_not_lost(leader_code: int, code: int) -> None:
    """No launcher, no report: the connection closed first, the leader's status says the rest."""
    merged = exits.merge_reports(FailureReport(exit_code=0, rank=0, step=3), (), leader_code)
    assert exits.final_code(leader_code, merged) == code


def one_launch(leader_code: int, *reports: FailureReport, lost: tuple[int, ...] = ()) -> Story:
    """A job that may not be launched again, running, and then down."""
    return Story(restart=RestartPolicy(max_crashes=0)).running(at=7).emptied(leader_code, *lost).settled(*reports)


def six_endings() -> dict[str, Story]:
    """Done, preempted and flushed, preempted without a flush, stopped, crashed with code 7, a rank killed by SIGKILL."""
    back = {"accepted": True, "relaunch_in_s": None, "detail": "handed back"}
    done = Story().running(at=9).tell(*(events.RankCompleted(rank=rank, step=10) for rank in range(2))).emptied(0, 0, 1).settled()
    flushed = Story().running(at=7).tell(a_notice()).saved(0, 1, step=8).checked(8).emptied(1, 0, 1).settled()
    unflushed = Story().running(at=7).tell(a_notice()).fire("flush").emptied(1, 0, 1).settled()
    stopped = (
        Story().running(at=7).tell(a_notice("stop", exit_code=130)).saved(0, 1, step=8).checked(8).emptied(0, 0, 1).settled()
    )
    return {
        "done": done,
        "preempted, flushed": flushed.answer(events.RequeueEnded, **back),
        "preempted, not flushed": unflushed.answer(events.RequeueEnded, **back),
        "stopped": stopped,
        "crashed": one_launch(1, FailureReport(exit_code=7, rank=1, error="SystemExit: 7"), lost=(1,)),
        "killed": one_launch(1, FailureReport(exit_code=137, rank=0, error="killed by SIGKILL"), lost=(0,)),
    }


def test_six_endings_are_told_apart() -> None:
    """Outcome, code and whether the flush ended well tell six endings apart; only done is 0 (case C49)."""
    told = {name: (story.job.outcome, story.job.exit_code, story.job.flush_ok) for name, story in six_endings().items()}
    assert told == {
        "done": ("SUCCEEDED", 0, False),
        "preempted, flushed": ("REQUEUED", 75, True),
        "preempted, not flushed": ("REQUEUED", 75, False),
        "stopped": ("STOPPED", 130, True),
        "crashed": ("FAILED", 7, False),
        "killed": ("FAILED", 137, False),
    }


def test_no_two_ends_of_an_attempt_that_differ_read_the_same() -> None:
    """The reason tells a flushed preemption from one that was not."""
    ends = [
        exits.AttemptEnd(leader_code=code, pending=pending, flushed=flushed, all_completed=False, report=None)
        for code, pending, flushed in (
            (0, None, False),
            (1, "preempt", True),
            (1, "preempt", False),
            (1, "stop", True),
            (7, None, False),
        )
    ]
    reasons = [exits.classify_exit(end)[1] for end in ends]
    assert all(one != other for one, other in itertools.combinations(reasons, 2))
