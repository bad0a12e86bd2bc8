"""One thread, one selector, one next deadline. Everything that happens becomes an event for the machine, one at a time."""

import collections
import selectors
import signal
from collections.abc import Callable

from supervise_daemon.core import events, machine
from supervise_daemon.core.commands import Requeue, Tell
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.ports import NoticeSource
from supervise_daemon.runtime.clock import Clock
from supervise_daemon.runtime.executor import Executor
from supervise_daemon.runtime.rank_server import RankServer
from supervise_daemon.runtime.recorder import Recorder
from supervise_daemon.runtime.signals import SignalInbox
from supervise_daemon.runtime.workers import Workers

_LOOK_S = 0.2
"""While a tree is expected to end: members that are not our children can vanish without a SIGCHLD to us."""


class Loop:
    """Runs a job to its end."""

    def __init__(
        self, job: Job, executor: Executor, recorder: Recorder, selector: selectors.BaseSelector, clock: Clock | None = None
    ) -> None:
        self.job = job
        self.executor = executor
        self.recorder = recorder
        self.selector = selector
        self.clock = clock or Clock()
        self.sources: list[NoticeSource] = []
        self.after_step: Callable[[Job, str, bool], None] = lambda job, reason, told: None
        """Called with the job, the reason, and whether the step told the user something."""
        self._due: dict[str, float] = {}
        self._queue: collections.deque[events.Event] = collections.deque()
        self._leader_gone = False

    def post(self, event: events.Event) -> None:
        """Queue an event; the loop's thread only."""
        self._queue.append(event)

    def run(self, inbox: SignalInbox) -> int:
        """Until the machine says Finish; the exit code."""
        workers, server = self.executor.world.workers, self.executor.world.server
        self.selector.register(inbox.fd, selectors.EVENT_READ, inbox)
        self.selector.register(workers.fd, selectors.EVENT_READ, workers)
        self.post(events.Begun())
        while True:
            self._drain()
            if self.executor.exit is not None:
                self.recorder.scribe.sync()
                return self.executor.exit[0]
            for key, mask in self.selector.select(self._wait_s()):
                match key.data:
                    case SignalInbox():
                        self._heard(key.data.read())
                    case Workers():
                        self._queue.extend(key.data.take())
                    case RankServer():
                        server.handle(key.fd, mask)
            self._timers()
            self._watch_tree()

    def _drain(self) -> None:
        while self._queue and self.executor.exit is None:
            self._step(self._queue.popleft())

    def _step(self, event: events.Event) -> None:
        before = self.job
        self.job, commands, reason = machine.step(self.job, event, self.clock.now(), self.clock.wall())
        if isinstance(event, events.Spawned):
            self._leader_gone = False
        self.recorder.record(before, event, self.job, commands, reason)
        for command in commands:
            if isinstance(command, Requeue):
                self.recorder.scribe.sync()  # the intent is on disk before the act
            self.executor.perform(command)
        self.recorder.publish(self.job, reason, changed=before.phase is not self.job.phase or bool(commands))
        self.after_step(self.job, reason, any(isinstance(command, Tell) for command in commands))

    def _wait_s(self) -> float | None:
        """Until the next deadline; None: nothing to wake up for."""
        now = self.clock.now()
        deadlines = list(self._due.values())
        if self.executor.timer is not None:
            deadlines.append(self.executor.timer[0])
        for source in self.sources:
            deadlines.append(self._due.setdefault(f"poll {source.name}", now + source.poll_s))
        if self._leader_gone and self.job.phase in _TREE_PHASES:
            deadlines.append(now + _LOOK_S)
        publish_at = self.recorder.publish_at
        if publish_at is not None:
            deadlines.append(publish_at)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _timers(self) -> None:
        now = self.clock.now()
        timer = self.executor.timer
        if timer is not None and timer[0] <= now:
            self.executor.timer = None
            self.post(events.TimerFired(name=timer[1], serial=timer[2]))
        for source in self.sources:
            key = f"poll {source.name}"
            if self._due.get(key, now) <= now:
                self._due[key] = now + source.poll_s
                notice = source.poll()
                if notice is not None:
                    self.post(notice)
        self.recorder.publish_if_due(self.job, now)

    def _heard(self, numbers: list[int]) -> None:
        for number in dict.fromkeys(numbers):
            if number == signal.SIGCHLD:
                self._reap()
                continue
            for rule in self.executor.world.spec.signals:
                if rule.number == number:
                    self.post(
                        events.NoticeArrived(source=rule.name, action=rule.action, grace_s=rule.grace_s, exit_code=128 + number)
                    )

    def _reap(self) -> None:
        world, output = self.executor.world, self.executor.output
        for pid, returncode in world.tree.reap():
            if pid == world.tree.leader:
                world.tree.leader = None
                self._leader_gone = True
                self.post(events.LeaderExited(returncode=returncode))
            elif output is not None and pid == output.pid:
                again = output.ended(returncode)
                if again is not None:
                    world.tree.servants.add(again)

    def _watch_tree(self) -> None:
        # The rank sockets and the leader's end come by different ways: the leader's end must have been stepped first.
        self._drain()
        if self._leader_gone and self.job.phase in _TREE_PHASES and not self.executor.world.tree.members():
            self._leader_gone = False
            self.post(events.TreeEmptied())


_TREE_PHASES = (Phase.STARTING, Phase.RUNNING, Phase.FLUSHING, Phase.STOPPING, Phase.KILLING)
