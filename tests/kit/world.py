"""A small nondeterministic world around the machine: what may happen next, and what commands do to it. Immutable.

A leader, a few ranks, answers that may come at any time, timers that may fire at any time. Time stands still at 0: every order
of events is possible whatever the timers say. The search over it, and what must hold, is in `explorer`.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from supervise_daemon.core import commands, events
from supervise_daemon.core.job import Flush, Job, Phase
from supervise_daemon.core.restart import FailureReport

Place = Literal["absent", "up", "dead", "gone"]
"""dead: the process is gone, the loss of its connection has not been heard of yet."""
Leader = Literal["none", "spawning", "up", "dying", "gone"]


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as it really is."""

    rich: bool = False
    """It may do everything; others only attach, save, complete and get lost, which keeps worlds of several ranks small."""
    place: Place = "absent"
    progressed: bool = False
    completed: bool = False
    asked: bool = False
    """The flush under way waits for its answer."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """Everything around the machine, and what a checker must remember."""

    ranks: tuple[Rank, ...]
    hooked: bool = True
    relaunches: bool = True
    """The requeue backend may say: launch again here."""
    begun: bool = False
    timer: tuple[str, int] | None = None
    leader: Leader = "none"
    request: commands.Command | None = None
    """The newest request that was not answered yet. Older answers are probed, not kept: see `explorer`."""
    check: str | None = None
    """A periodic checkpoint under verification."""
    notices: tuple[events.NoticeArrived, ...] = ()
    """Kinds of notices that may arrive."""
    notices_left: int = 0
    terms_left: int = 0
    """SIGTERMs that ranks may still get from elsewhere."""
    saves_left: int = 0
    spawns: int = 0
    requeues: int = 0
    requeued: bool = False
    """In this attempt."""
    leave_asked: bool = False
    """In this attempt."""
    stopped: bool = False
    """A user's stop was heard."""
    finished: bool = False

    @property
    def tree_lives(self) -> bool:
        """Whether a process of the attempt may exist, as far as anybody could know."""
        return self.leader != "none" or self.ranks_live

    @property
    def ranks_live(self) -> bool:
        """Whether a rank is up."""
        return any(rank.place == "up" for rank in self.ranks)


def change(world: World, **fields: object) -> World:
    """A copy with these fields changed."""
    return msgspec.structs.replace(world, **fields)


def _with_rank(world: World, number: int, **fields: object) -> World:
    rank = msgspec.structs.replace(world.ranks[number], **fields)
    return change(world, ranks=(*world.ranks[:number], rank, *world.ranks[number + 1 :]))


def possible(job: Job, world: World) -> Iterator[tuple[events.Event, World]]:
    """Every event that may come next, with the world it comes from."""
    if world.finished:
        return
    if not world.begun:
        yield events.Begun(), change(world, begun=True)
        return
    if world.timer is not None:
        yield events.TimerFired(name=world.timer[0], serial=world.timer[1]), change(world, timer=None)
    if world.notices_left:
        for notice in world.notices:
            heard = world.stopped or notice.action == "stop"
            yield notice, change(world, notices_left=world.notices_left - 1, stopped=heard)
    yield from _answers(job, world)
    yield from _leader(job, world)
    for number in range(len(world.ranks)):
        yield from _rank(job, world, number)


def _answers(job: Job, world: World) -> Iterator[tuple[events.Event, World]]:
    answered = change(world, request=None)
    match world.request:
        case commands.ChooseResumePoint(ticket=ticket):
            points = [(None, None)] if job.newest_step is None else [(f"step-{job.newest_step}", job.newest_step)]
            for path, step in points:
                yield events.ResumePointChosen(ticket=ticket, path=path, step=step, reason="newest"), answered
            yield events.ResumeRefused(ticket=ticket, reason="none left", exit_code=66), answered
        case commands.CheckCheckpoint(ticket=ticket, path=path, step=step):
            for whole in (True, False):
                yield events.CheckpointChecked(ticket=ticket, path=path, step=step, whole=whole, reason=""), answered
        case commands.Settle(ticket=ticket):
            report = FailureReport(exit_code=9, rank=1, error="told by the launcher")
            for reports in ((), (report,)):
                yield events.Settled(ticket=ticket, reports=reports, newest_step=job.newest_step, jitter=0.0), answered
        case commands.Requeue(ticket=ticket):
            for accepted, relaunch_in_s in ((True, None), (False, None), (True, 1.0))[: 3 if world.relaunches else 2]:
                over = change(answered, requeued=world.requeued and relaunch_in_s is None)
                yield events.RequeueEnded(ticket=ticket, accepted=accepted, relaunch_in_s=relaunch_in_s, detail=""), over
    if world.check is not None:
        step = int(world.check.removeprefix("step-"))
        for whole in (True, False):
            yield (
                events.CheckpointChecked(ticket=0, path=world.check, step=step, whole=whole, reason=""),
                change(world, check=None),
            )


def _leader(job: Job, world: World) -> Iterator[tuple[events.Event, World]]:
    if world.leader == "spawning":
        yield events.Spawned(pid=1), change(world, leader="up")
        yield events.SpawnFailed(error="no such file", exit_code=127), change(world, leader="none")
    if world.leader == "up":
        for code in (0, 7):
            yield events.LeaderExited(returncode=code), change(world, leader="gone")
    if world.leader == "dying":
        yield events.LeaderExited(returncode=-9), change(world, leader="gone")
    if world.leader == "gone" and not world.ranks_live:
        yield events.TreeEmptied(), change(world, leader="none")


def _rank(job: Job, world: World, number: int) -> Iterator[tuple[events.Event, World]]:
    rank = world.ranks[number]
    step = (job.resume_step or 0) + rank.progressed
    if rank.place == "absent" and world.leader == "up" and world.hooked:
        yield events.RankAttached(rank=number, world_size=len(world.ranks)), _with_rank(world, number, place="up")
    if rank.place == "dead":
        yield events.RankLost(rank=number), _with_rank(world, number, place="gone", asked=False)
    if rank.place in ("up", "dead") and rank.asked and job.flush is not None:
        # The last words of a rank that is dead already are read before the end of its connection.
        flush_id, done = job.flush.flush_id, _with_rank(world, number, asked=False)
        yield events.RankSaved(rank=number, flush_id=flush_id, step=step, path=f"step-{step}", seconds=1.0), done
        if rank.rich:
            yield events.RankHadNothing(rank=number, flush_id=flush_id, step=step), done
            yield events.RankSaveFailed(rank=number, flush_id=flush_id, step=step, error="full"), done
            yield events.RankCommitted(rank=number, flush_id=flush_id, step=None, why="torn"), world
    if rank.place != "up":
        return
    yield events.RankLost(rank=number), _with_rank(world, number, place="gone", asked=False)
    if rank.rich:
        yield events.RankFailed(rank=number, step=step, error="ValueError"), _with_rank(world, number, place="dead", asked=False)
    if world.terms_left:
        yield events.RankTermed(rank=number), change(world, terms_left=world.terms_left - 1)
    if not rank.completed:
        done = _with_rank(world, number, completed=True, asked=False)
        yield events.RankCompleted(rank=number, step=step), done
        if rank.rich and not rank.progressed:
            yield events.RankProgressed(rank=number, step=step + 1), _with_rank(world, number, progressed=True)
        elif rank.rich and world.saves_left and job.flush is None:
            # One receipt stands for all: the machine asks for the check with the last of them.
            yield events.RankSaved(rank=number, flush_id=0, step=step, path=f"step-{step}", seconds=1.0), world


def obey(world: World, command: commands.Command) -> World:
    """The world after a command."""
    match command:
        case commands.ArmTimer(name=name, serial=serial):
            return change(world, timer=(name, serial))
        case commands.DisarmTimer():
            return change(world, timer=None)
        case commands.ChooseResumePoint():
            return change(world, request=command, requeued=False, leave_asked=False)
        case commands.CheckCheckpoint(ticket=0, path=path):
            return change(world, check=path, saves_left=max(world.saves_left - 1, 0))
        case commands.Settle() | commands.CheckCheckpoint():
            return change(world, request=command)
        case commands.Requeue():
            return change(world, request=command, requeued=True, requeues=world.requeues + 1)
        case commands.Spawn():
            fresh = tuple(Rank(rich=rank.rich) for rank in world.ranks)
            return change(world, request=None, leader="spawning", ranks=fresh, spawns=world.spawns + 1)
        case commands.AskFlush():
            if command.flush_id == BASE:
                return world  # the flush under way, with less time: who has answered does not answer again
            ranks = [msgspec.structs.replace(rank, asked=rank.place == "up" and not rank.completed) for rank in world.ranks]
            return change(world, ranks=tuple(ranks))
        case commands.AskLeave():
            return change(world, leave_asked=True)
        case commands.KillTree():
            ranks = [msgspec.structs.replace(rank, place="dead") if rank.place == "up" else rank for rank in world.ranks]
            return change(world, ranks=tuple(ranks), leader="dying" if world.leader == "up" else world.leader)
        case commands.Finish():
            return change(world, finished=True)
        case _:
            return world


def rebase(job: Job, world: World) -> tuple[Job, World]:
    """The same configuration, with what can make no difference any more set back, so that equal configurations are equal.

    Counters only ever grow; all that matters is whether a serial, ticket or flush id is the newest. Older ones are probed by the
    explorer everywhere.
    """
    request, timer, flush = world.request, world.timer, job.flush
    if request is not None:
        newest = getattr(request, "ticket", None) == job.ticket
        request = msgspec.structs.replace(request, ticket=BASE) if newest else None
        if isinstance(request, commands.Requeue):
            request = msgspec.structs.replace(request, reason="", left_s=None)
    if timer is not None and timer[1] == job.serial:
        timer = (timer[0], BASE)
    if flush is not None:
        flush = msgspec.structs.replace(flush, flush_id=BASE, failed=("",) if flush.failed else ())
        if job.phase is not Phase.FLUSHING:
            flush = Flush(flush_id=BASE, purpose=flush.purpose, flush_by=0.0, stop_by=0.0, done=flush.done)
    notice = job.notice
    if notice is not None:
        notice = msgspec.structs.replace(notice, sources=())
    job = msgspec.structs.replace(
        job,
        serial=BASE,
        ticket=BASE,
        flushes=BASE,
        flush=flush,
        notice=notice,
        attempt=min(job.attempt, 1),
        preemptions=0,
        step_s=None,
        save_s=None,
        flush_ok=False,
    )
    world = change(world, request=request, timer=timer)
    return _between_attempts(job, world) if job.phase in (Phase.WAITING, Phase.REQUEUEING, Phase.ENDED) else (job, world)


def _between_attempts(job: Job, world: World) -> tuple[Job, World]:
    fresh = Job(limits=job.limits)
    kept = ("phase", "attempt", "serial", "due", "ticket", "flushes", "set_aside", "notice", "newest_step", "crashes")
    job = msgspec.structs.replace(fresh, outcome=job.outcome, **{name: getattr(job, name) for name in kept})
    ranks = [Rank(rich=rank.rich, place="dead" if rank.place == "dead" else "gone") for rank in world.ranks]
    return job, change(world, ranks=tuple(ranks))


BASE = 5
