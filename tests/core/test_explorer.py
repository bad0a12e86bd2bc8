"""The machine under every order of events, and the proof that the explorer would notice if a rule were broken."""

from collections.abc import Callable

import msgspec
import pytest

from kit.explorer import Broken, Step, explore
from kit.worlds import WORLDS, job_with_crashes, walk
from supervise_daemon.core import commands, ending, events, machine, training
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.core.transition import Now, Transition, evolve


@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_events_keeps_the_rules(name: str) -> None:
    """No order of events breaks a rule, in a world in which the job can succeed, fail and spend its whole crash budget."""
    max_crashes, world = WORLDS[name]
    found = walk(name)
    assert found.configurations > 1_000
    assert {"SUCCEEDED", "FAILED"} <= {outcome for outcome, _ in found.outcomes}
    assert found.most_spawns >= 1 + max_crashes
    assert not world.notices or {"preempt": "REQUEUED", "stop": "STOPPED"}.get(world.notices[0].action, "FAILED") in {
        outcome for outcome, _ in found.outcomes
    }


# --- planted bugs: each wraps the machine's step and breaks one rule


def _handler(phase: Phase, kind: type[events.Event], handler: machine.Handler, name: str = "") -> Step:
    """The machine with another handler in one place of its table (of its timers, when `name` is given)."""

    def step(job: Job, event: events.Event, now: float, wall: float) -> Transition:
        if job.phase is phase and type(event) is kind and (not name or (event.name == name and event.serial == job.serial)):
            return handler(job, event, Now(now, wall))
        return machine.step(job, event, now, wall)

    return step


def _before(bug: Callable[[Job, events.Event], events.Event]) -> Step:
    return lambda job, event, now, wall: machine.step(job, bug(job, event), now, wall)


def _after(bug: Callable[[Job, Transition], Transition]) -> Step:
    return lambda job, event, now, wall: bug(job, machine.step(job, event, now, wall))


def _no_serials(job: Job, event: events.Event) -> events.Event:
    return msgspec.structs.replace(event, serial=job.serial) if isinstance(event, events.TimerFired) else event


def _no_tickets(*kinds: type[events.Event]) -> Callable[[Job, events.Event], events.Event]:
    return lambda job, event: msgspec.structs.replace(event, ticket=job.ticket) if isinstance(event, kinds) else event


def _settle_at_once(job: Job, event: events.Event, now: Now) -> Transition:
    return ending.tree_emptied(job, events.TreeEmptied(), now)


def _stop_is_a_preemption(job: Job, done: Transition) -> Transition:
    notice = done[0].notice
    if notice is None or notice.action != "stop":
        return done
    return evolve(done[0], notice=msgspec.structs.replace(notice, action="preempt")), done[1], done[2]


def _no_disarming(job: Job, done: Transition) -> Transition:
    return done[0], tuple(command for command in done[1] if not isinstance(command, commands.DisarmTimer)), done[2]


def _zero_for_a_preemption(job: Job, done: Transition) -> Transition:
    if done[0].outcome != "REQUEUED":
        return done
    sent = (
        msgspec.structs.replace(command, exit_code=0) if isinstance(command, commands.Finish) else command for command in done[1]
    )
    return evolve(done[0], exit_code=0), tuple(sent), done[2]


def _twice(kind: type[commands.Command]) -> Callable[[Job, Transition], Transition]:
    return lambda job, done: (done[0], (*done[1], *(command for command in done[1] if isinstance(command, kind))), done[2])


def _no_memory(job: Job, done: Transition) -> Transition:
    return evolve(done[0], crashes=()), done[1], done[2]


def _relaunch(job: Job, event: events.Event, now: Now) -> Transition:
    return ending.wait(job, now, 0.0, "it will not die: start another")


def _flush_again(job: Job, event: events.NoticeArrived, now: Now) -> Transition:
    return training.notice(job, event, now)


def _patient(job: Job, event: events.TimerFired, now: Now) -> Transition:
    return ending.let_finish(job, now, "a little longer")


def _postpone(job: Job, event: events.NoticeArrived, now: Now) -> Transition:
    job, sent, why = ending.notice_while_stopping(job, event, now)
    job, timer = ending.rearm(job, ("stop", now.monotonic + job.limits.leave_s))
    return job, (*sent, *timer), why


def _run_on(job: Job, event: events.RankLost, now: Now) -> Transition:
    return evolve(job, lost=job.lost | {event.rank}), (), "go on without it"


def _missing_row(job: Job, event: events.Event) -> events.Event:
    if isinstance(event, events.RankLost) and job.phase is Phase.SETTLING:
        raise machine.IllegalEvent("RankLost cannot happen in SETTLING")
    return event


def _impatient_flush(job: Job, event: events.RankSaved, now: Now) -> Transition:
    job, _, _ = training.saved(job, event, now)
    return training._flush_done(job, now, "the first receipt is enough") if job.flush is not None else (job, (), "")


ONE_RANK, TWO_RANKS, PLAIN = "one rank and two notices", "two ranks and a notice", "two plain ranks and two notices"
PREEMPTED, CRASHED, STRAY = "preempted and crashed", "two crashes", "a stray term and a flush"

BUGS: dict[str, tuple[str, Step, str]] = {
    "settling when the leader exits": (
        TWO_RANKS,
        _handler(Phase.RUNNING, events.LeaderExited, _settle_at_once),
        "SETTLING by LeaderExited",
    ),
    "a timer whose serial is not checked": (PREEMPTED, _before(_no_serials), "old news must change nothing, TimerFired did"),
    "a late choice that is not seen to be late": (PREEMPTED, _before(_no_tickets(events.ResumePointChosen)), "old news must"),
    "a late settling that is not seen to be late": (PREEMPTED, _before(_no_tickets(events.Settled)), "old news must"),
    "a late answer of the requeue": (PREEMPTED, _before(_no_tickets(events.RequeueEnded)), "old news must"),
    "an old check that ends a newer flush": (
        ONE_RANK,
        _before(_no_tickets(events.CheckpointChecked)),
        "must not end a newer flush",
    ),
    "a requeue after a user's stop": (PREEMPTED, _after(_stop_is_a_preemption), "although a user said stop"),
    "a phase left without disarming": (CRASHED, _after(_no_disarming), "without disarming"),
    "a launch from KILLING": (CRASHED, _handler(Phase.KILLING, events.TimerFired, _relaunch, "kill"), "while the tree may live"),
    "a requeue from KILLING": (
        CRASHED,
        _handler(Phase.KILLING, events.TimerFired, lambda job, event, now: ending._requeue(job, now, ""), "kill"),
        "Requeue while the tree may live",
    ),
    "a second flush for a second notice": (
        ONE_RANK,
        _handler(Phase.FLUSHING, events.NoticeArrived, _flush_again),
        "started anew by a second notice",
    ),
    "a flush that ends with the first receipt": (
        PLAIN,
        _handler(Phase.FLUSHING, events.RankSaved, _impatient_flush),
        "before every rank had answered",
    ),
    "exit code 0 for a preemption": (PREEMPTED, _after(_zero_for_a_preemption), "exit code 0 for REQUEUED"),
    "two requeues": (PREEMPTED, _after(_twice(commands.Requeue)), "a second requeue"),
    "leaving twice": (CRASHED, _after(_twice(commands.Finish)), "after Finish"),
    "crashes that are forgotten": (CRASHED, _after(_no_memory), "the crash budget is broken"),
    "patience without end": (
        CRASHED,
        _handler(Phase.STOPPING, events.TimerFired, _patient, "stop"),
        "timers alone never lead out",
    ),
    "a kill that every notice postpones": (
        ONE_RANK,
        _handler(Phase.STOPPING, events.NoticeArrived, _postpone),
        "beyond the deadline",
    ),
    "training on without a rank": (CRASHED, _handler(Phase.RUNNING, events.RankLost, _run_on), "a rank was lost"),
    "a stray term that is forgotten": (
        STRAY,
        _handler(Phase.RUNNING, events.RankTermed, lambda job, event, now: (evolve(job, termed=True), (), "so what")),
        "a SIGTERM of a rank is forgotten",
    ),
    "a row that is missing": (CRASHED, _before(_missing_row), "IllegalEvent"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_explorer_finds(bug: str) -> None:
    """A machine with this bug breaks the rule that is there for it."""
    name, step, rule = BUGS[bug]
    max_crashes, world = WORLDS[name]
    with pytest.raises(Broken, match=rule) as broken:
        explore(job_with_crashes(max_crashes), world, step)
    assert "Begun" in str(broken.value), "the message tells the story from its beginning"
