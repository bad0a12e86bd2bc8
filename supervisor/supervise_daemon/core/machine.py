"""The state machine of a job: `step(job, event, now, wall) -> (job, commands, reason)`. Pure.

Theory of operation. A job goes through attempts, and each attempt through the phases of `job.Phase`. Signals, deaths,
timers and messages are all events for one table, TABLE, keyed by (phase, event type). A pair that is missing
is illegal: IllegalEvent, and nothing changes. Rules that the explorer in tests/core checks over every order of events:

- a spawn or a requeue never happens while a tree may live: SETTLING is entered only by TreeEmptied;
- every phase but RUNNING has exactly one armed timer, and leaving a phase disarms it (timers carry a serial);
- an answer to an older request (ticket) is ignored;
- a requeue is the last command of an attempt, and there is one for each attempt at most;
- a second notice merges: the nearer deadline and the graver action win, the flush is never started anew for it.

The phases' own rules are in `starting`, `training` and `ending`, in the order an attempt lives them.
"""

from collections.abc import Callable
from typing import Any

from supervise_daemon.core import ending, events, starting, training
from supervise_daemon.core.commands import Command
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.core.transition import Now, Transition, ignore

Handler = Callable[[Job, Any, Now], Transition]
"""The table sees to it that a handler only gets the type of event it is registered for."""


class IllegalEvent(Exception):
    """This event cannot happen in this phase; the job is unchanged."""


_TREE = (Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING)


def _rows() -> dict[tuple[Phase, type[events.Event]], Handler]:
    rows: dict[tuple[Phase, type[events.Event]], Handler] = {}

    def on(event: type[events.Event], handler: Handler, *phases: Phase) -> None:
        for phase in phases:
            assert (phase, event) not in rows, f"two handlers for {event.__name__} in {phase}"
            rows[phase, event] = handler

    on(events.Begun, starting.begin, Phase.WAITING)
    # An answer can be overtaken by a notice: then its ticket is old, wherever the job has got to.
    not_waiting = tuple(phase for phase in Phase if phase is not Phase.WAITING)
    on(events.ResumePointChosen, starting.resume_chosen, Phase.WAITING)
    on(events.ResumeRefused, starting.resume_refused, Phase.WAITING)
    on(events.ResumePointChosen, _late, *not_waiting)
    on(events.ResumeRefused, _late, *not_waiting)
    on(events.Spawned, starting.spawned, *_TREE)
    on(events.SpawnFailed, starting.spawn_failed, *_TREE)
    on(events.RankAttached, starting.rank_attached, *_TREE)
    news: dict[type[events.Event], Handler] = {
        events.RankProgressed: training.progressed,
        events.RankCompleted: training.completed,
        events.RankFailed: training.failed,
        events.RankLost: training.lost,
        events.RankTermed: training.termed,
        events.RankCommitted: training.committed,
        events.RankSaved: training.saved,
        events.RankHadNothing: training.had_nothing,
        events.RankSaveFailed: training.save_failed,
    }
    for kind, handler in news.items():
        on(kind, handler, *_TREE)
    # Sockets are read apart from child deaths: the last words of a rank may come after the tree is empty.
    late_news: tuple[type[events.Event], ...] = (*news, events.RankAttached)
    for kind in late_news:
        on(kind, _late, Phase.WAITING, Phase.SETTLING, Phase.REQUEUEING, Phase.ENDED)
    on(events.CheckpointChecked, training.checked, *_TREE)
    on(events.CheckpointChecked, training.checked_late, *(phase for phase in Phase if phase not in _TREE))
    on(events.LeaderExited, training.leader_exited, *_TREE)
    on(events.TreeEmptied, ending.tree_emptied, *_TREE)
    on(events.NoticeArrived, starting.notice_while_waiting, Phase.WAITING)
    on(events.NoticeArrived, training.notice, Phase.STARTING, Phase.RUNNING)
    on(events.NoticeArrived, training.notice_while_flushing, Phase.FLUSHING)
    on(events.NoticeArrived, ending.notice_while_stopping, Phase.STOPPING, Phase.KILLING)
    on(events.NoticeArrived, ending.notice_while_settling, Phase.SETTLING)
    on(events.NoticeArrived, ending.notice_while_requeueing, Phase.REQUEUEING)
    on(events.NoticeArrived, _late, Phase.ENDED)
    on(events.NoticeWithdrawn, _late, *Phase)
    on(events.Settled, ending.settled, Phase.SETTLING)
    on(events.Settled, _late, *(phase for phase in Phase if phase is not Phase.SETTLING))
    on(events.RequeueEnded, ending.requeue_ended, Phase.REQUEUEING)
    on(events.RequeueEnded, _late, *(phase for phase in Phase if phase is not Phase.REQUEUEING))
    on(events.TimerFired, _timer, *Phase)
    return rows


def _late(job: Job, event: events.Event, now: Now) -> Transition:
    return ignore(job, f"{type(event).__name__} comes too late to matter in {job.phase}")


_TIMERS: dict[tuple[Phase, str], Handler] = {
    (Phase.WAITING, "relaunch"): starting.waiting_timer,
    (Phase.WAITING, "choose"): starting.waiting_timer,
    (Phase.STARTING, "attach"): starting.attach_timer,
    (Phase.RUNNING, "stray"): training.stray_timer,
    (Phase.FLUSHING, "flush"): training.flush_timer,
    (Phase.STOPPING, "stop"): ending.stop_timer,
    (Phase.KILLING, "kill"): ending.kill_timer,
    (Phase.SETTLING, "settle"): ending.settle_timer,
    (Phase.REQUEUEING, "requeue"): ending.requeue_timer,
}


def _timer(job: Job, event: events.TimerFired, now: Now) -> Transition:
    handler = _TIMERS.get((job.phase, event.name))
    if event.serial != job.serial or handler is None:
        return ignore(job, f"stale timer {event.name}")
    return handler(job, event, now)


TABLE = _rows()
"""Every legal (phase, event) pair and what is done about it."""


def step(job: Job, event: events.Event, now: float, wall: float) -> tuple[Job, tuple[Command, ...], str]:
    """The job after `event`, what to do now, and why. Raises IllegalEvent, changing nothing."""
    handler = TABLE.get((job.phase, type(event)))
    if handler is None:
        raise IllegalEvent(f"{type(event).__name__} cannot happen in {job.phase}")
    return handler(job, event, Now(now, wall))
