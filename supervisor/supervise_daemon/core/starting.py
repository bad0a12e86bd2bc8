"""Rules of WAITING and STARTING: when to launch, from where, and when all ranks are there. Pure."""

from supervise_daemon.core import ending, training
from supervise_daemon.core.commands import ChooseResumePoint, Finish, Requeue, Spawn, Tell
from supervise_daemon.core.events import (
    Begun,
    NoticeArrived,
    RankAttached,
    ResumePointChosen,
    ResumeRefused,
    Spawned,
    SpawnFailed,
    TimerFired,
)
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.core.merging import merge_notice
from supervise_daemon.core.transition import Now, Transition, enter, evolve, ignore, stay


def begin(job: Job, event: Begun, now: Now) -> Transition:
    """The first attempt is launched at once."""
    return ending.wait(job, now, 0.0, "begin")


def waiting_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """Relaunch is due, or choosing takes long."""
    if event.name == "relaunch":
        job = evolve(job, ticket=job.ticket + 1)
        choose = ChooseResumePoint(ticket=job.ticket, set_aside=job.set_aside)
        job = evolve(job, set_aside=None)
        return enter(
            job,
            Phase.WAITING,
            "choose the resume point",
            timer=("choose", now.monotonic + job.limits.choose_s),
            commands=[choose],
        )
    text = (
        f"still choosing the resume point of attempt {job.attempt + 1} after {job.limits.choose_s:.0f} s: verifying checkpoints"
    )
    return enter(job, Phase.WAITING, text, timer=("choose", now.monotonic + job.limits.choose_s), commands=[Tell(text=text)])


def resume_chosen(job: Job, event: ResumePointChosen, now: Now) -> Transition:
    """Launch. From here on a tree may live, whatever happens."""
    if event.ticket != job.ticket:
        return ignore(job, "answer to an older request")
    job = evolve(
        job,
        attempt=job.attempt + 1,
        resume=event.path,
        resume_step=event.step,
        newest_step=event.step if event.path is not None else job.newest_step,
        world_size=None,
        attached=frozenset(),
        completed=frozenset(),
        lost=frozenset(),
        step=None,
        failure=None,
        ran=False,
        termed=False,
        leave_asked=False,
        leader_code=None,
        saves=(),
    )
    spawn = Spawn(attempt=job.attempt, resume=event.path, resume_step=event.step)
    return enter(job, Phase.STARTING, event.reason, timer=("attach", now.monotonic + job.limits.attach_s), commands=[spawn])


def resume_refused(job: Job, event: ResumeRefused, now: Now) -> Transition:
    """Nothing may be launched."""
    if event.ticket != job.ticket:
        return ignore(job, "answer to an older request")
    job = evolve(job, outcome="FAILED", exit_code=event.exit_code)
    return enter(job, Phase.ENDED, event.reason, timer=None, commands=[Finish(exit_code=event.exit_code, reason=event.reason)])


def notice_while_waiting(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """No tree lives: hand the job back, or end, at once."""
    if event.action == "flush":
        return ending.refuse_flush(job, "no attempt is running")
    job = merge_notice(job, event, now)
    # A choice that is still being made must not launch anything any more.
    job = evolve(job, ticket=job.ticket + 1)
    if job.notice is not None and job.notice.action == "stop":
        return ending.end_stopped(job, f"{event.source} while no attempt was running")
    requeue = Requeue(ticket=job.ticket, reason=f"{event.source} while no attempt was running", left_s=event.grace_s)
    timer = ("requeue", now.monotonic + job.limits.requeue_s)
    return enter(
        evolve(job, preemptions=job.preemptions + 1), Phase.REQUEUEING, "preempted while waiting", timer=timer, commands=[requeue]
    )


def spawned(job: Job, event: Spawned, now: Now) -> Transition:
    """The leader runs."""
    return stay(job, f"leader is pid {event.pid}")


def spawn_failed(job: Job, event: SpawnFailed, now: Now) -> Transition:
    """A command that cannot be started at all will not start the next time either."""
    job = evolve(job, outcome="FAILED", exit_code=event.exit_code)
    return enter(job, Phase.ENDED, event.error, timer=None, commands=[Finish(exit_code=event.exit_code, reason=event.error)])


def rank_attached(job: Job, event: RankAttached, now: Now) -> Transition:
    """RUNNING once the whole world is there."""
    job = evolve(job, world_size=event.world_size, attached=job.attached | {event.rank})
    if job.phase is Phase.STARTING and job.hooked:
        return training.go_on(job, now, f"all {event.world_size} ranks attached")
    return stay(job, f"rank {event.rank} of {event.world_size} attached")


def attach_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """Not every rank attached in time: the job runs, and the user hears what that means."""
    if job.attached:
        text = f"{len(job.attached)} of {job.world_size} ranks attached within {job.limits.attach_s:.0f} s; still waiting for the others"
        return enter(job, Phase.STARTING, text, timer=("attach", now.monotonic + job.limits.attach_s), commands=[Tell(text=text)])
    text = (
        f"no rank has attached within {job.limits.attach_s:.0f} s: at a preemption this job can only be sent a SIGTERM, nothing will "
        "be flushed for it (add supervise_hooks.attach(...) to the script)"
    )
    return training.go_on(job, now, text, Tell(text=text))
