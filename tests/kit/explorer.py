"""Breadth-first search over every order of events that `world` allows, and the rules that must hold on each step of it."""

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from kit.world import BASE, World, obey, possible, rebase
from supervise_daemon.core import commands, events, machine
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.core.transition import Transition

Step = Callable[[Job, events.Event, float, float], Transition]
Edge = tuple[Phase, str, Phase]

TREE = (Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING)
TIMERS = {
    Phase.WAITING: ("relaunch", "choose"),
    Phase.STARTING: ("attach",),
    Phase.RUNNING: (None, "stray"),
    Phase.FLUSHING: ("flush",),
    Phase.STOPPING: ("stop",),
    Phase.KILLING: ("kill",),
    Phase.SETTLING: ("settle",),
    Phase.REQUEUEING: ("requeue",),
    Phase.ENDED: (None,),
}


class Broken(AssertionError):
    """A rule does not hold; the message tells the shortest story that breaks it."""


class Found(msgspec.Struct):
    """What an exploration saw."""

    configurations: int = 0
    steps: int = 0
    edges: set[Edge] = msgspec.field(default_factory=set)
    outcomes: set[tuple[str, int]] = msgspec.field(default_factory=set)
    most_spawns: int = 0


Config = tuple[Job, World]


def explore(job: Job, world: World, step: Step = machine.step, limit: int = 200_000) -> Found:
    """Walk every configuration reachable from here; raises Broken with the shortest story for a broken rule."""
    found = Found()
    start = rebase(job, world)
    parents: dict[Config, tuple[Config, events.Event] | None] = {start: None}
    reached_from: dict[Config, list[Config]] = {}
    queue = deque([start])
    probed: set[Job] = set()
    while queue:
        config = queue.popleft()
        job, world = config
        event: events.Event | None = None
        try:
            if world.begun and job not in probed:
                probed.add(job)
                for event in _old_news(job):
                    _check_old_news(job, event, step)
            event = None
            for event, around in possible(job, world):
                after, sent, _ = step(job, event, 0.0, 0.0)
                around_after = around
                for command in sent:
                    _check_command(job, around_after, command)
                    around_after = obey(around_after, command)
                _check_step(job, event, after, sent, around_after)
                found.steps += 1
                if job.phase is not after.phase:
                    found.edges.add((job.phase, _name(event), after.phase))
                if after.phase is Phase.ENDED and job.phase is not Phase.ENDED:
                    found.outcomes.add((str(after.outcome), after.exit_code if after.exit_code is not None else -1))
                found.most_spawns = max(found.most_spawns, around_after.spawns)
                following = rebase(after, around_after)
                reached_from.setdefault(following, []).append(config)
                if following not in parents:
                    parents[following] = (config, event)
                    queue.append(following)
        except (AssertionError, machine.IllegalEvent) as problem:
            raise Broken(f"{type(problem).__name__}: {problem}\n{_story(parents, config, event)}") from problem
        if len(parents) > limit:
            raise Broken(f"more than {limit} configurations: the world is not finite\n{_story(parents, config, None)}")
    found.configurations = len(parents)
    _check_no_dead_ends(parents, reached_from, step)
    return found


def _name(event: events.Event) -> str:
    if isinstance(event, events.TimerFired):
        return f"{event.name} timer"
    return f"{event.action} notice" if isinstance(event, events.NoticeArrived) else type(event).__name__


def _story(parents: dict[Config, tuple[Config, events.Event] | None], config: Config, last: events.Event | None) -> str:
    lines = [f"  then {last}"] if last is not None else []
    lines.append(f"  in {config[0].phase}: {config[1]}")
    parent = parents[config]
    while parent is not None:
        lines.append(f"  {parent[0][0].phase}: {parent[1]}")
        parent = parents[parent[0]]
    return "\n".join(reversed(lines))


# --- old news: stale answers and timers may come in any configuration


def _old_news(job: Job) -> Iterator[events.Event]:
    old = BASE - 1
    for name in ("relaunch", "choose", "attach", "stray", "flush", "stop", "kill", "settle", "requeue"):
        yield events.TimerFired(name=name, serial=old)
    yield events.ResumePointChosen(ticket=old, path=None, step=None, reason="")
    yield events.ResumeRefused(ticket=old, reason="", exit_code=66)
    yield events.Settled(ticket=old, reports=(), newest_step=1, jitter=0.0)
    yield events.RequeueEnded(ticket=old, accepted=True, relaunch_in_s=None, detail="")
    yield events.RankCommitted(rank=0, flush_id=old, step=None, why="")
    yield events.RankHadNothing(rank=0, flush_id=old, step=0)
    if job.flush is not None and job.flush.path is not None and job.flush.step is not None:
        yield events.CheckpointChecked(ticket=old, path=job.flush.path, step=job.flush.step, whole=True, reason="")


def _check_old_news(job: Job, event: events.Event, step: Step) -> None:
    after, sent, _ = step(job, event, 0.0, 0.0)
    if isinstance(event, events.CheckpointChecked):
        assert after.phase is job.phase, "an old check must not end a newer flush"
        return
    assert after == job and not sent, f"old news must change nothing, {type(event).__name__} did"


# --- rules


def _check_command(job: Job, world: World, command: commands.Command) -> None:
    assert not world.finished, f"{command} after Finish"
    kind = type(command).__name__
    if isinstance(command, commands.Spawn | commands.Requeue | commands.ChooseResumePoint):
        assert not world.tree_lives, f"{kind} while the tree may live"
        assert not world.stopped, f"{kind} although a user said stop"
    if isinstance(command, commands.Requeue):
        assert not world.requeued, "a second requeue of one attempt"
    elif world.requeued:
        after_requeue = commands.Tell | commands.ArmTimer | commands.DisarmTimer | commands.Finish | commands.ChooseResumePoint
        assert isinstance(command, after_requeue), f"{kind} after the requeue of the attempt"
    if isinstance(command, commands.Finish):
        assert not world.tree_lives or command.exit_code == 70, "left while the tree may live, without saying so by code 70"
    if isinstance(command, commands.AskLeave):
        assert not world.leave_asked, "ranks are asked to leave twice"
    if isinstance(command, commands.AskFlush | commands.AskLeave | commands.TermTree | commands.KillTree):
        assert job.phase in TREE, f"{kind} in {job.phase}"


def _check_step(job: Job, event: events.Event, after: Job, sent: tuple[commands.Command, ...], world: World) -> None:
    _check_timer(job, event, after, sent, world)
    if after.phase is Phase.SETTLING and job.phase is not Phase.SETTLING:
        assert isinstance(event, events.TreeEmptied), f"SETTLING by {type(event).__name__}"
    spawned = any(isinstance(command, commands.Spawn) for command in sent)
    assert (after.phase is Phase.STARTING and job.phase is Phase.WAITING) == spawned, "Spawn is what leads to STARTING"
    assert (after.phase is Phase.ENDED) == world.finished, "ENDED and Finish go together"
    assert world.spawns <= after.limits.restart.max_crashes + 1 + world.requeues, (
        f"{world.spawns} spawns: the crash budget is broken"
    )
    _check_flush(job, after, sent)
    if after.phase is Phase.RUNNING:
        assert after.lost <= after.completed, "a rank was lost and the attempt runs on"
        assert not after.termed or world.timer is not None, "a SIGTERM of a rank is forgotten"
        assert after.notice is None, "a notice is forgotten"
    if after.phase is Phase.ENDED and job.phase is not Phase.ENDED:
        _check_end(after, sent, world)


def _check_timer(job: Job, event: events.Event, after: Job, sent: tuple[commands.Command, ...], world: World) -> None:
    timing = [command for command in sent if isinstance(command, commands.ArmTimer | commands.DisarmTimer)]
    assert len(timing) <= 1, "two timers armed in one step"
    assert after.phase is job.phase or timing, f"left {job.phase} for {after.phase} without disarming"
    assert (world.timer[0] if world.timer else None) in TIMERS[after.phase], f"{world.timer} armed in {after.phase}"
    assert world.timer is None or world.timer[1] == after.serial, "the armed timer is not the newest"
    assert (world.timer is None) == (after.due is None), "the job does not know whether a timer is armed"
    if after.phase is Phase.STOPPING and after.notice is not None and after.due is not None:
        assert after.due <= after.notice.deadline, "the tree may live beyond the deadline"
    if isinstance(event, events.NoticeArrived) and after.phase is job.phase and job.due is not None:
        assert after.due is not None and after.due <= job.due, "a notice gave more time"


def _check_flush(job: Job, after: Job, sent: tuple[commands.Command, ...]) -> None:
    for ask in sent:
        if not isinstance(ask, commands.AskFlush):
            continue
        assert after.phase is Phase.FLUSHING and after.flush is not None and ask.flush_id == after.flush.flush_id
        if job.phase is Phase.FLUSHING and job.flush is not None:
            if ask.flush_id == job.flush.flush_id:
                assert ask.purpose == job.flush.purpose and ask.deadline < job.flush.flush_by, (
                    "a flush is asked again for nothing"
                )
                assert after.flush.saved == job.flush.saved, "a flush was started anew by a second notice"
            else:
                assert (job.flush.purpose, ask.purpose) == ("continue", "leave"), "a flush was started anew by a second notice"
    if job.phase is Phase.FLUSHING and after.flush is not None and after.flush.done:
        assert after.flush.answered == after.attached, "a flush ended well before every rank had answered"
        assert not after.flush.failed, "a flush ended well although a rank could not save"


def _check_end(after: Job, sent: tuple[commands.Command, ...], world: World) -> None:
    finish = [command for command in sent if isinstance(command, commands.Finish)]
    assert len(finish) == 1 and sent[-1] is finish[0], "Finish comes once, and last"
    assert finish[0].exit_code == after.exit_code
    wanted_zero = after.outcome == "STOPPED" and after.notice is not None and after.notice.exit_code == 0
    assert after.exit_code != 0 or after.outcome == "SUCCEEDED" or wanted_zero, f"exit code 0 for {after.outcome}"
    assert after.outcome != "REQUEUED" or (world.requeued and after.exit_code == 75)
    assert after.outcome != "REQUEUED" or not world.stopped, "handed back although a user said stop"
    assert after.outcome != "STOPPED" or world.stopped, "STOPPED without being asked"
    assert after.outcome != "SUCCEEDED" or after.leader_code == 0, "SUCCEEDED with another code than 0"


def _check_no_dead_ends(
    parents: dict[Config, tuple[Config, events.Event] | None], reached_from: dict[Config, list[Config]], step: Step
) -> None:
    good = [config for config in parents if config[0].phase in (Phase.ENDED, Phase.RUNNING)]
    seen, queue = set(good), deque(good)
    while queue:
        for before in reached_from.get(queue.popleft(), ()):
            if before not in seen:
                seen.add(before)
                queue.append(before)
    timed: set[Job] = set()
    for config in parents:
        if config not in seen:
            raise Broken(f"a dead end: neither ENDED nor RUNNING can be reached\n{_story(parents, config, None)}")
        if config[0].phase in _BY_TIMERS_ALONE and config[0] not in timed:
            timed.add(config[0])
            _check_timers_alone(parents, config, step)


_BY_TIMERS_ALONE = (Phase.FLUSHING, Phase.STOPPING, Phase.KILLING, Phase.SETTLING, Phase.REQUEUEING)


def _check_timers_alone(parents: dict[Config, tuple[Config, events.Event] | None], config: Config, step: Step) -> None:
    """Whatever never answers, the timers lead out of these phases."""
    job, world = config
    for _ in range(len(_BY_TIMERS_ALONE)):
        if job.phase not in _BY_TIMERS_ALONE or world.timer is None:
            break
        fired = events.TimerFired(name=world.timer[0], serial=world.timer[1])
        job, sent, _ = step(job, fired, 0.0, 0.0)
        world = msgspec.structs.replace(world, timer=None)
        for command in sent:
            world = obey(world, command)
    if job.phase in _BY_TIMERS_ALONE:
        raise Broken(f"timers alone never lead out of {job.phase}\n{_story(parents, config, None)}")
