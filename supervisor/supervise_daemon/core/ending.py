"""Rules of STOPPING, KILLING, SETTLING, REQUEUEING: empty the tree, judge the attempt, decide what is next. Pure."""

from supervise_daemon.core import exits
from supervise_daemon.core.commands import AskLeave, Command, Finish, KillTree, Requeue, Settle, Tell, TermTree
from supervise_daemon.core.events import NoticeArrived, RequeueEnded, Settled, TimerFired, TreeEmptied
from supervise_daemon.core.job import Job, Outcome, Phase
from supervise_daemon.core.merging import merge_notice
from supervise_daemon.core.restart import Crash, FailureReport, GiveUp, decide_restart
from supervise_daemon.core.transition import Now, Transition, enter, evolve, ignore, rearm, stay
from supervise_hooks.contract import exit_codes


def wait(job: Job, now: Now, delay_s: float, reason: str) -> Transition:
    """WAITING for the relaunch timer; an obeyed preemption is forgotten, it belonged to the last attempt."""
    return enter(evolve(job, notice=None, flush=None), Phase.WAITING, reason, timer=("relaunch", now.monotonic + delay_s))


# --- ways into STOPPING


def collapse(job: Job, now: Now, reason: str) -> Transition:
    """A rank or the leader is gone: give the launcher a moment to notice and to report, then kill the rest."""
    told = ask_leave(job, reason) if job.termed and job.lost else (job, (), reason)
    by = _within_notice(job, now.monotonic + job.limits.collapse_s, now)
    return enter(told[0], Phase.STOPPING, reason, timer=("stop", by), commands=told[1])


def _within_notice(job: Job, at: float, now: Now) -> float:
    return at if job.notice is None else max(min(at, job.notice.deadline), now.monotonic)


def refuse_flush(job: Job, why: str) -> Transition:
    """A `flush` that cannot be done now; whoever asked hears it."""
    text = f"cannot flush now: {why}"
    return stay(evolve(job, flush_ok=False), text, Tell(text=text))


def ask_leave(job: Job, reason: str) -> Transition:
    """Ask the remaining ranks to exit; once."""
    return stay(evolve(job, leave_asked=True), reason, AskLeave(reason=reason))


def leave(job: Job, now: Now, text: str) -> Transition:
    """The flush is over, well or not: ranks exit by themselves."""
    by = _within_notice(job, now.monotonic + job.limits.leave_s, now)
    if job.flush is not None:
        by = min(by, max(job.flush.stop_by, now.monotonic))
    job = evolve(job, leave_asked=True)
    return enter(job, Phase.STOPPING, text, timer=("stop", by), commands=[Tell(text=text), AskLeave(reason=text)])


def let_finish(job: Job, now: Now, text: str) -> Transition:
    """Every rank completed: the job ends by itself, within the notice's time."""
    by = job.notice.deadline if job.notice is not None else now.monotonic + job.limits.leave_s
    return enter(job, Phase.STOPPING, text, timer=("stop", by), commands=[Tell(text=text)])


def stop_unhooked(job: Job, now: Now, reason: str) -> Transition:
    """No flush is possible. A job that trains unhooked gets a SIGTERM and its time; one still starting has nothing to lose."""
    assert job.notice is not None
    if job.phase is Phase.RUNNING:
        by = max(job.notice.deadline - min(1.0, (job.notice.deadline - now.monotonic) / 10), now.monotonic)
        text = f"{reason}: passing SIGTERM on"
    else:
        by = min(now.monotonic + job.limits.leave_s, job.notice.deadline)
        text = f"{reason}, nothing new to save"
    # Attached ranks take a SIGTERM for news: those of a job that is still starting are told to go as well.
    leave: list[Command] = [AskLeave(reason=text)] if job.phase is Phase.STARTING and job.attached else []
    job = evolve(job, leave_asked=job.leave_asked or bool(leave))
    return enter(job, Phase.STOPPING, text, timer=("stop", by), commands=[Tell(text=text), TermTree(), *leave])


def end_stopped(job: Job, reason: str) -> Transition:
    """ENDED because a user wanted it."""
    code = job.notice.exit_code if job.notice is not None else exit_codes.FINISHED
    return _end(job, "STOPPED", code, reason)


# --- STOPPING and KILLING


def notice_while_stopping(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """Too late to flush; it still decides what the end means, and may shorten it."""
    if event.action == "flush":
        return refuse_flush(job, "the attempt is ending")
    job = merge_notice(job, event, now)
    reason = f"{event.source} while the attempt was ending"
    if job.phase is not Phase.STOPPING or job.notice is None or job.due is None or job.notice.deadline >= job.due:
        return stay(job, reason)
    job, commands = rearm(job, ("stop", job.notice.deadline))
    return stay(job, f"{reason}, with less time", *commands)


def stop_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """Patience is over."""
    return enter(
        job,
        Phase.KILLING,
        "the tree did not end by itself",
        timer=("kill", now.monotonic + job.limits.kill_s),
        commands=[KillTree()],
    )


def kill_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """A process that even SIGKILL does not end (D state) is reported, not waited for."""
    reason = (
        f"processes of the attempt survive SIGKILL after {job.limits.kill_s:.0f} s (stuck in the kernel?): see `supervise ps`"
    )
    return _end(job, "FAILED", exit_codes.INTERNAL, reason)


def tree_emptied(job: Job, event: TreeEmptied, now: Now) -> Transition:
    """Read what the attempt left, then judge it."""
    job = evolve(job, ticket=job.ticket + 1)
    settle = Settle(ticket=job.ticket, leader_code=job.leader_code if job.leader_code is not None else -9)
    return enter(
        job, Phase.SETTLING, "the tree is empty", timer=("settle", now.monotonic + job.limits.settle_s), commands=[settle]
    )


# --- SETTLING and REQUEUEING


def notice_while_settling(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """No tree lives any more; the notice decides what is next."""
    if event.action == "flush":
        return refuse_flush(job, "the attempt has ended")
    return stay(merge_notice(job, event, now), f"{event.source} after the tree was empty")


def settle_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """Reading takes too long: judge by what is known."""
    return _judge(job, (), job.newest_step, 0.5, now, "settling timed out")


def settled(job: Job, event: Settled, now: Now) -> Transition:
    """Judge the attempt."""
    if event.ticket != job.ticket:
        return ignore(job, "answer to an older request")
    return _judge(job, event.reports, event.newest_step, event.jitter, now, "settled")


def _judge(job: Job, reports: tuple[FailureReport, ...], newest: int | None, jitter: float, now: Now, how: str) -> Transition:
    leader_code = job.leader_code if job.leader_code is not None else -9
    report = exits.merge_reports(job.failure, reports, leader_code)
    job = evolve(job, newest_step=newest if newest is not None else job.newest_step)
    end, why = exits.classify_exit(
        exits.AttemptEnd(
            leader_code=leader_code,
            pending=job.notice.action if job.notice is not None else None,
            flushed=job.flush is not None and job.flush.done,
            all_completed=job.all_completed,
            report=report,
            rank_failed=job.failure is not None and job.failure.error != "",
        )
    )
    if end == "finished":
        return _end(job, "SUCCEEDED", exit_codes.FINISHED, why)
    if end == "stopped":
        return end_stopped(job, why)
    if end == "preempted":
        return _requeue(job, now, f"{why} ({how})")
    return _restart(job, leader_code, report, jitter, now)


def _requeue(job: Job, now: Now, why: str) -> Transition:
    job = evolve(job, ticket=job.ticket + 1, preemptions=job.preemptions + 1)
    left_s = max(job.notice.deadline - now.monotonic, 0.0) if job.notice is not None else None
    requeue = Requeue(ticket=job.ticket, reason=why, left_s=left_s)
    return enter(job, Phase.REQUEUEING, why, timer=("requeue", now.monotonic + job.limits.requeue_s), commands=[requeue])


def _restart(job: Job, leader_code: int, report: FailureReport | None, jitter: float, now: Now) -> Transition:
    what = exits.describe_failure(leader_code, report)
    if job.resume is not None and not job.attached and exits.final_code(leader_code, report) == exit_codes.USAGE:
        # argparse's code for an option it does not know; scripts with hooks read the environment and need no option.
        what += " (a usage error: if the command does not know the resume option, pass --resume-argument none)"
    crash = Crash(
        at=now.wall,
        signature=report.signature if report is not None else f"{leader_code}:",
        step=report.step if report is not None and report.step is not None else job.step,
        resumed_from=job.resume,
        # Without hooks no step is heard of: having run long enough to be RUNNING must do.
        started_training=(job.step or 0) > (job.resume_step or 0) if job.hooked else job.ran,
        newest_step=job.newest_step,
        killed=exits.was_killed(leader_code, report),
    )
    job = evolve(job, crashes=(*job.crashes, crash), failure=report)
    decision = decide_restart(job.crashes, job.limits.restart, jitter)
    if isinstance(decision, GiveUp):
        text = f"{what}; giving up: {decision.reason}"
        return _end(job, "FAILED", exits.final_code(leader_code, report), text)
    text = f"{what}; launching again in {decision.delay_s:.1f} s: {decision.reason}"
    waiting = wait(evolve(job, set_aside=decision.set_aside), now, decision.delay_s, text)
    return waiting[0], (*waiting[1], Tell(text=text)), text


def requeue_ended(job: Job, event: RequeueEnded, now: Now) -> Transition:
    """Handed back, to be launched here again, or refused."""
    if event.ticket != job.ticket:
        return ignore(job, "answer to an older request")
    if job.notice is not None and job.notice.action == "stop":
        handed = event.accepted and event.relaunch_in_s is None
        return end_stopped(job, f"stopped while it was handed back: {event.detail}" if handed else "stopped between two attempts")
    if event.relaunch_in_s is not None:
        return wait(job, now, event.relaunch_in_s, event.detail)
    if event.accepted:
        return _end(job, "REQUEUED", exit_codes.PREEMPTED, event.detail)
    return _end(
        job,
        "REQUEUED",
        exit_codes.PREEMPTED,
        f"cannot requeue: {event.detail}; exit code 75 asks whoever started us to run it again",
    )


def requeue_timer(job: Job, event: TimerFired, now: Now) -> Transition:
    """The backend does not answer; our exit code still says what is wanted."""
    if job.notice is not None and job.notice.action == "stop":
        return end_stopped(job, "stopped while it was handed back, which was not confirmed")
    return _end(job, "REQUEUED", exit_codes.PREEMPTED, f"the requeue was not confirmed within {job.limits.requeue_s:.0f} s")


def notice_while_requeueing(job: Job, event: NoticeArrived, now: Now) -> Transition:
    """The job is being handed back already; a user's stop still prevents that we launch it again ourselves, or ask for it."""
    if event.action == "flush":
        return refuse_flush(job, "the attempt has ended")
    return stay(merge_notice(job, event, now), f"{event.source} while the job was being handed back")


def _end(job: Job, outcome: Outcome, exit_code: int, reason: str) -> Transition:
    job = evolve(job, outcome=outcome, exit_code=exit_code)
    return enter(job, Phase.ENDED, reason, timer=None, commands=[Finish(exit_code=exit_code, reason=reason)])
