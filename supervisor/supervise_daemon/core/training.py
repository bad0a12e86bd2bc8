"""Rules of RUNNING and FLUSHING: notices become flushes, receipts become checkpoints, a lost rank ends the attempt. Pure."""

from typing import Any

import msgspec

from supervise_daemon.core import ending
from supervise_daemon.core.commands import AskFlush, CheckCheckpoint, Command, Prune, Tell
from supervise_daemon.core.events import (
    CheckpointChecked,
    LeaderExited,
    NoticeArrived,
    RankCommitted,
    RankCompleted,
    RankFailed,
    RankHadNothing,
    RankLost,
    RankProgressed,
    RankSaved,
    RankSaveFailed,
    RankTermed,
    TimerFired,
)
from supervise_daemon.core.grace import plan_grace
from supervise_daemon.core.job import Flush, Job, Phase
from supervise_daemon.core.merging import merge_notice
from supervise_daemon.core.restart import FailureReport
from supervise_daemon.core.transition import Now, Transition, enter, evolve, ignore, rearm, stay
from supervise_hooks.contract.messages import Purpose

# --- news of ranks, in any phase with a tree


def progressed(job: Job, event: RankProgressed, now: Now) -> Transition:
    """Remember how far and how fast."""
    step = event.step if job.step is None else max(job.step, event.step)
    return stay(evolve(job, step=step, step_s=event.step_s or job.step_s), f"rank {event.rank} at step {event.step}")


def completed(job: Job, event: RankCompleted, now: Now) -> Transition:
    """A rank's loop ended; in a flush that counts as its answer."""
    job = evolve(job, completed=job.completed | {event.rank})
    reason = f"rank {event.rank} completed at step {event.step}"
    if job.phase is Phase.FLUSHING and job.flush is not None:
        return _answer(job, event.rank, now, reason, flush=job.flush)
    return stay(job, reason)


def failed(job: Job, event: RankFailed, now: Now) -> Transition:
    """An exception; the loss of the rank follows. The first trouble is the cause."""
    reason = f"rank {event.rank} failed at step {event.step}: {event.error}"
    if job.failure is not None:
        return stay(job, f"{reason} (after rank {job.failure.rank})")
    return stay(evolve(job, failure=FailureReport(exit_code=1, rank=event.rank, error=event.error, step=event.step)), reason)


def lost(job: Job, event: RankLost, now: Now) -> Transition:
    """A rank is gone. Unless it had finished or was told to leave, the attempt cannot go on."""
    job = evolve(job, lost=job.lost | {event.rank})
    reason = f"rank {event.rank} is gone"
    if event.rank in job.completed or job.phase in (Phase.STOPPING, Phase.KILLING):
        return stay(job, reason)
    leaving = job.flush is not None and job.flush.purpose == "leave"
    if job.phase is Phase.FLUSHING and leaving and job.flush is not None and event.rank in job.flush.saved:
        return stay(job, f"{reason}, its receipt is there")
    if job.failure is None:
        job = evolve(job, failure=FailureReport(exit_code=0, rank=event.rank, step=job.step))
    return ending.collapse(job, now, reason)


def termed(job: Job, event: RankTermed, now: Now) -> Transition:
    """A SIGTERM at a rank. Launchers TERM the peers of a rank that crashed: wait a moment to see whether one is lost."""
    job = evolve(job, termed=True)
    reason = f"rank {event.rank} got a SIGTERM of its own"
    if job.phase is Phase.RUNNING and job.due is None:
        job, commands = rearm(job, ("stray", now.monotonic + job.limits.stray_s))
        return stay(job, reason, *commands)
    if job.phase is Phase.STOPPING and job.lost and not job.leave_asked:
        return ending.ask_leave(job, f"{reason}: its launcher is stopping it")
    return stay(job, reason)


def stray_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """Nobody was lost, so the SIGTERM was a notice that went past us."""
    return notice(job, NoticeArrived(source="SIGTERM at a rank", action="preempt", grace_s=job.limits.default_grace_s), now)


def leader_exited(job: Job, event: LeaderExited, now: Now) -> Transition:
    """The launcher is gone. In a flush its ranks may still be saving; otherwise the rest must follow at once."""
    job = evolve(job, leader_code=event.returncode)
    reason = f"the leader exited {event.returncode}"
    if job.phase is Phase.FLUSHING:
        return stay(job, f"{reason}, ranks may still be saving")
    if job.phase in (Phase.STOPPING, Phase.KILLING):
        return stay(job, reason)
    return ending.collapse(job, now, reason)


def go_on(job: Job, now: Now, text: str, *commands: Command) -> Transition:
    """RUNNING, for the first time or again. A SIGTERM that a rank got meanwhile is looked into now."""
    timer = ("stray", now.monotonic + job.limits.stray_s) if job.termed else None
    return enter(evolve(job, ran=True, flush=None), Phase.RUNNING, text, timer=timer, commands=commands)


# --- notices


def notice(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """While running: flush if the ranks can, otherwise stop in the time there is."""
    if event.action != "flush":
        job = merge_notice(job, event, now)
    if not job.hooked or job.phase is Phase.STARTING:
        if event.action == "flush":
            who = f"{len(job.attached)} of {job.world_size} ranks are attached" if job.attached else "no rank is attached"
            return ending.refuse_flush(job, who)
        return ending.stop_unhooked(job, now, f"{event.source}: nothing attached that could save")
    if job.all_completed:
        # Nobody is left in a loop that could answer a flush.
        if event.action == "flush":
            return ending.refuse_flush(job, "every rank has completed")
        return ending.let_finish(job, now, f"{event.source}: every rank has completed")
    purpose: Purpose = "continue" if event.action == "flush" else "leave"
    return _begin_flush(job, purpose, event, now)


def notice_while_flushing(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """Tighten the flush that is under way; only a flush that was to go on is asked again, to leave."""
    assert job.flush is not None
    if event.action == "flush":
        return stay(job, "a flush is already under way")
    job = merge_notice(job, event, now)
    if job.flush is not None and job.flush.purpose == "continue":
        return _begin_flush(job, "leave", event, now)
    assert job.notice is not None
    assert job.flush is not None
    plan = plan_grace(now.monotonic, max(job.notice.deadline - now.monotonic, 0.0), job.step_s, job.save_s)
    if plan.flush_by >= job.flush.flush_by - 0.1:
        return stay(job, f"{event.source}: already flushing for {', '.join(job.notice.sources)}")
    flush = evolve_flush(job.flush, flush_by=plan.flush_by, stop_by=plan.stop_by)
    job, commands = rearm(evolve(job, flush=flush), ("flush", flush.flush_by))
    return stay(job, f"{event.source}: the flush has less time: {plan.reason}", *commands, _ask(flush, event.source))


def evolve_flush(flush: Flush, **changes: Any) -> Flush:
    """A copy with these fields changed."""
    return msgspec.structs.replace(flush, **changes)


def _begin_flush(job: Job, purpose: Purpose, event: NoticeArrived, now: Now) -> Transition:
    deadline = job.notice.deadline if job.notice is not None else now.monotonic + event.grace_s
    plan = plan_grace(now.monotonic, max(deadline - now.monotonic, 0.0), job.step_s, job.save_s)
    # The ticket makes answers to checks of an earlier flush old: this one may save to the same path.
    job = evolve(job, flushes=job.flushes + 1, ticket=job.ticket + 1, flush_ok=False)
    flush = Flush(flush_id=job.flushes, purpose=purpose, flush_by=plan.flush_by, stop_by=plan.stop_by, answered=job.completed)
    text = f"{event.source}: flushing ({plan.reason})"
    return enter(
        evolve(job, flush=flush),
        Phase.FLUSHING,
        text,
        timer=("flush", plan.flush_by),
        commands=[_ask(flush, event.source), Tell(text=text)],
    )


def _ask(flush: Flush, source: str) -> AskFlush:
    return AskFlush(flush_id=flush.flush_id, purpose=flush.purpose, deadline=flush.flush_by, reason=source)


# --- answers to a flush, and periodic saves


def committed(job: Job, event: RankCommitted, now: Now) -> Transition:
    """The common step; or the ranks gave up, and then all of them did (one atomic key decides)."""
    if job.phase is not Phase.FLUSHING or job.flush is None or event.flush_id != job.flush.flush_id:
        return ignore(job, "not the flush under way")
    if event.step is None:
        return _flush_failed(job, now, f"the ranks could not agree on a step: {event.why}")
    return stay(evolve(job, flush=evolve_flush(job.flush, step=event.step)), f"ranks will save at step {event.step}")


def saved(job: Job, event: RankSaved, now: Now) -> Transition:
    """A receipt is on disk."""
    job = evolve(job, save_s=event.seconds)
    reason = f"rank {event.rank} saved step {event.step}"
    flush = job.flush
    if job.phase is Phase.FLUSHING and flush is not None and event.flush_id == flush.flush_id:
        flush = evolve_flush(flush, step=event.step, path=event.path, saved=flush.saved | {event.rank})
        return _answer(job, event.rank, now, reason, flush=flush)
    return _periodic(job, event, reason)


def had_nothing(job: Job, event: RankHadNothing, now: Now) -> Transition:
    """Nothing new since the resume point."""
    if job.phase is not Phase.FLUSHING or job.flush is None or event.flush_id != job.flush.flush_id:
        return ignore(job, "not the flush under way")
    return _answer(job, event.rank, now, f"rank {event.rank} has nothing new since step {event.step}", flush=job.flush)


def save_failed(job: Job, event: RankSaveFailed, now: Now) -> Transition:
    """The previous checkpoint stands."""
    text = f"rank {event.rank} could not save step {event.step}: {event.error}"
    flush = job.flush
    if job.phase is Phase.FLUSHING and flush is not None and event.flush_id == flush.flush_id:
        return _answer(job, event.rank, now, text, flush=evolve_flush(flush, failed=(*flush.failed, text)))
    return stay(job, text, Tell(text=text))


def checked(job: Job, event: CheckpointChecked, now: Now) -> Transition:
    """A checkpoint was proved whole, or not; the one of a flush decides how the flush ended."""
    commands: tuple[Prune | Tell, ...] = ()
    if event.whole and event.step >= (job.newest_step or 0):
        job = evolve(job, newest_step=event.step)
        commands = (Prune(newest=event.path),)
    if job.phase is Phase.FLUSHING and job.flush is not None and event.ticket == job.ticket and job.flush.path == event.path:
        if not event.whole:
            return _flush_failed(job, now, f"the flushed checkpoint is not whole: {event.reason}")
        done = _flush_done(job, now, f"flushed step {event.step} to {event.path}, verified")
        return done[0], (*commands, *done[1]), done[2]
    if not event.whole:
        text = f"the checkpoint of step {event.step} is not whole: {event.reason}"
        return stay(job, text, Tell(text=text))
    return stay(job, f"step {event.step} is whole: {event.path}", *commands)


def checked_late(job: Job, event: CheckpointChecked, now: Now) -> Transition:
    """No tree lives any more: worth knowing, but whoever settles or chooses now reads the folder without us pruning in it."""
    if event.whole:
        job = evolve(job, newest_step=max(event.step, job.newest_step or 0))
    return stay(job, f"step {event.step} is {'whole' if event.whole else f'not whole: {event.reason}'}")


def flush_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """The flush did not fit in its time."""
    assert job.flush is not None
    silent = sorted(job.attached - job.flush.answered)
    who = "verification" if not silent else f"rank {', '.join(map(str, silent[:8]))}"
    return _flush_failed(job, now, f"the flush did not fit in its time, still waiting for {who}")


def _answer(job: Job, rank: int, now: Now, reason: str, flush: Flush) -> Transition:
    answered_before = rank in flush.answered
    flush = evolve_flush(flush, answered=flush.answered | {rank})
    job = evolve(job, flush=flush)
    if answered_before or flush.answered != job.attached:
        return stay(job, reason)
    if flush.failed:
        return _flush_failed(job, now, "; ".join(flush.failed))
    if flush.path is not None and flush.step is not None:
        job = evolve(job, ticket=job.ticket + 1)
        return stay(job, f"{reason}: all receipts are in", CheckCheckpoint(ticket=job.ticket, path=flush.path, step=flush.step))
    return _flush_done(job, now, "every rank completed before the flush" if job.all_completed else "nothing new to save")


def _flush_done(job: Job, now: Now, text: str) -> Transition:
    assert job.flush is not None
    flush = evolve_flush(job.flush, done=True)
    job = evolve(job, flush_ok=True, flush=flush)
    if flush.purpose == "continue":
        return go_on(job, now, f"{text}; going on", Tell(text=text))
    if job.all_completed:
        return ending.let_finish(job, now, text)
    return ending.leave(job, now, text)


def _flush_failed(job: Job, now: Now, text: str) -> Transition:
    assert job.flush is not None
    purpose = job.flush.purpose
    job = evolve(job, flush_ok=False)
    newest = "no checkpoint exists" if job.newest_step is None else f"the checkpoint of step {job.newest_step} stands"
    text = f"{text}; {newest}"
    if purpose == "continue":
        return go_on(job, now, text, Tell(text=text))
    return ending.leave(job, now, text)


def _periodic(job: Job, event: RankSaved, reason: str) -> Transition:
    ranks = dict(job.saves)
    ranks[event.path] = ranks.get(event.path, frozenset()) | {event.rank}
    if job.world_size is not None and len(ranks[event.path]) == job.world_size:
        del ranks[event.path]
        job = evolve(job, saves=tuple(ranks.items()))
        return stay(job, f"{reason}: all receipts are in", CheckCheckpoint(ticket=0, path=event.path, step=event.step))
    return stay(evolve(job, saves=tuple(ranks.items())), reason)
