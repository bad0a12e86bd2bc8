"""The table itself: every pair of phase and event is either legal or refused."""

import itertools

import pytest

from kit.builders import a_job, a_notice
from supervise_daemon.core import events, machine
from supervise_daemon.core.job import Flush, Job, Notice, Phase

ONE_OF_EACH: tuple[events.Event, ...] = (
    events.Begun(),
    events.ResumePointChosen(ticket=5, path=None, step=None, reason="fresh"),
    events.ResumeRefused(ticket=5, reason="none is whole", exit_code=66),
    events.Spawned(pid=1),
    events.SpawnFailed(error="no such file", exit_code=127),
    events.RankAttached(rank=0, world_size=2),
    events.RankProgressed(rank=0, step=3),
    events.RankCompleted(rank=0, step=3),
    events.RankFailed(rank=0, step=3, error="ValueError"),
    events.RankLost(rank=0),
    events.RankTermed(rank=0),
    events.RankCommitted(rank=0, flush_id=5, step=4, why=""),
    events.RankSaved(rank=0, flush_id=5, step=4, path="step-4", seconds=1.0),
    events.RankHadNothing(rank=0, flush_id=5, step=4),
    events.RankSaveFailed(rank=0, flush_id=5, step=4, error="full"),
    events.CheckpointChecked(ticket=5, path="step-4", step=4, whole=True, reason=""),
    a_notice(),
    events.NoticeWithdrawn(source="SIGTERM"),
    events.LeaderExited(returncode=1),
    events.TreeEmptied(),
    events.Settled(ticket=5, reports=(), newest_step=None, jitter=0.0),
    events.RequeueEnded(ticket=5, accepted=True, relaunch_in_s=None, detail="handed back"),
    events.TimerFired(name="stop", serial=5),
)
PRODUCT = [
    pytest.param(phase, event, id=f"{phase}-{type(event).__name__}") for phase, event in itertools.product(Phase, ONE_OF_EACH)
]


def job_in(phase: Phase) -> Job:
    """A job that can be in `phase`: tickets and serials are 5, two ranks are attached and nothing was lost."""
    flush = Flush(flush_id=5, purpose="leave", flush_by=20.0, stop_by=25.0)
    notice = Notice(sources=("SIGTERM",), action="preempt", deadline=30.0, exit_code=143)
    flushing = phase in (Phase.FLUSHING, Phase.STOPPING)
    return a_job(
        phase=phase,
        attempt=1,
        ticket=5,
        serial=5,
        due=None if phase in (Phase.RUNNING, Phase.ENDED) else 20.0,
        flushes=5,
        world_size=2,
        attached=frozenset({0, 1}),
        flush=flush if flushing else None,
        notice=notice if flushing else None,
    )


def test_the_product_holds_every_type_of_event() -> None:
    """A new event cannot be left out of the product."""
    assert {type(event) for event in ONE_OF_EACH} == set(events.Event.__subclasses__())


@pytest.mark.parametrize(("phase", "event"), PRODUCT)
def test_every_pair_is_in_the_table_or_refused(phase: Phase, event: events.Event) -> None:
    """A pair in the table gives a job, commands and a reason; any other raises; the old job is as it was in both cases."""
    job, same = job_in(phase), job_in(phase)
    if (phase, type(event)) in machine.TABLE:
        after, sent, reason = machine.step(job, event, 0.0, 0.0)
        assert isinstance(after, Job) and isinstance(sent, tuple) and reason
    else:
        with pytest.raises(machine.IllegalEvent, match=rf"{type(event).__name__} cannot happen in {phase}"):
            machine.step(job, event, 0.0, 0.0)
    assert job == same


IMPOSSIBLE = {
    events.Begun: {Phase.WAITING},
    events.LeaderExited: {Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING},
    events.TreeEmptied: {Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING},
    events.Spawned: {Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING},
    events.SpawnFailed: {Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING},
}


@pytest.mark.parametrize("kind", events.Event.__subclasses__(), ids=lambda kind: kind.__name__)
def test_only_events_of_a_tree_can_be_illegal(kind: type[events.Event]) -> None:
    """What comes from outside or may come late is legal everywhere; what needs a tree is legal only with one."""
    assert {phase for phase, event in machine.TABLE if event is kind} == IMPOSSIBLE.get(kind, set(Phase))


def test_an_ended_job_commands_nothing() -> None:
    """Whatever still arrives after the end."""
    for event in ONE_OF_EACH:
        if (Phase.ENDED, type(event)) in machine.TABLE:
            assert machine.step(job_in(Phase.ENDED), event, 0.0, 0.0)[1] == ()
