"""Notices merge: the nearer deadline and the graver action, in whatever order they come."""

from hypothesis import given
from hypothesis import strategies as st

from kit.builders import a_job, a_notice
from supervise_daemon.core.events import NoticeArrived
from supervise_daemon.core.job import Job
from supervise_daemon.core.merging import merge_notice
from supervise_daemon.core.transition import Now

NOTICES = st.builds(
    a_notice,
    action=st.sampled_from(["flush", "preempt", "stop"]),
    grace_s=st.floats(0, 1e4),
    source=st.sampled_from(["SIGTERM", "file", "slurm"]),
    exit_code=st.sampled_from([0, 75, 130]),
)
GRAVER = ("preempt", "stop")


def merged(notices: list[NoticeArrived]) -> Job:
    """A job that heard these, all at once."""
    job = a_job()
    for notice in notices:
        job = merge_notice(job, notice, Now(10.0, 0.0))
    return job


@given(notices=st.lists(NOTICES, max_size=5))
def test_the_nearest_deadline_and_the_gravest_action_win(notices: list[NoticeArrived]) -> None:
    """Over every notice that takes something away; a `flush` takes nothing. The code is that of the first of the gravest."""
    takes = [notice for notice in notices if notice.action != "flush"]
    kept = merged(notices).notice
    if not takes:
        assert kept is None
        return
    assert kept is not None
    assert kept.deadline == min(10.0 + notice.grace_s for notice in takes)
    gravest = max((notice.action for notice in takes), key=GRAVER.index)
    assert kept.action == gravest
    assert kept.exit_code == next(notice.exit_code for notice in takes if notice.action == gravest)
    assert list(kept.sources) == list(dict.fromkeys(notice.source for notice in takes))


@given(one=NOTICES, other=NOTICES)
def test_the_order_does_not_matter(one: NoticeArrived, other: NoticeArrived) -> None:
    """Commutative in action, deadline and sources."""
    there, back = merged([one, other]).notice, merged([other, one]).notice
    assert (there is None) == (back is None)
    if there is not None and back is not None:
        assert (there.action, there.deadline, set(there.sources)) == (back.action, back.deadline, set(back.sources))


@given(notice=NOTICES)
def test_the_same_notice_again_changes_nothing(notice: NoticeArrived) -> None:
    """Idempotent."""
    assert merged([notice, notice]) == merged([notice])
