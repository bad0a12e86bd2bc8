"""Jobs, notices, crashes and driven machines for tests, with overridable fields. No world here: that is `world`."""

from typing import Any

import msgspec

from supervise_daemon.core import commands, events, machine
from supervise_daemon.core.job import Job, Limits, Phase
from supervise_daemon.core.restart import Crash, RestartPolicy


def a_job(**changes: Any) -> Job:
    """A job that has not begun."""
    return msgspec.structs.replace(Job(limits=Limits()), **changes)


def a_notice(
    action: events.Action = "preempt", grace_s: float = 30.0, source: str = "SIGTERM", exit_code: int = 143
) -> events.NoticeArrived:
    """A notice as a signal gives it."""
    return events.NoticeArrived(source=source, action=action, grace_s=grace_s, exit_code=exit_code)


def a_crash(**changes: Any) -> Crash:
    """A crash in the middle of training, from a fresh start."""
    crash = Crash(at=0.0, signature="1:ValueError: x", step=5, resumed_from=None, started_training=True, newest_step=None)
    return msgspec.structs.replace(crash, **changes)


class Story:
    """Tells events to the machine one by one, the way the loop does; keeps what it commanded.

    Timers fire by `fire()`, which moves the clock to the armed one; answers to requests are told with the right ticket by `answer()`.
    """

    def __init__(self, *, world_size: int = 2, restart: RestartPolicy | None = None, **limits: Any) -> None:
        self.job = Job(limits=Limits(restart=restart or RestartPolicy(), **limits))
        self.world_size = world_size
        self.now = 100.0
        self.commands: list[commands.Command] = []
        """Everything commanded so far."""
        self.last: tuple[commands.Command, ...] = ()
        """What the last event led to."""
        self.reason = ""
        self.phases: list[Phase] = [self.job.phase]
        self.timer: commands.ArmTimer | None = None

    def tell(self, *told: events.Event) -> "Story":
        """Step through these events."""
        for event in told:
            self.job, self.last, self.reason = machine.step(self.job, event, self.now, self.now)
            self.commands += self.last
            for command in self.last:
                if isinstance(command, commands.ArmTimer):
                    self.timer = command
                elif isinstance(command, commands.DisarmTimer):
                    self.timer = None
            if self.job.phase is not self.phases[-1]:
                self.phases.append(self.job.phase)
        return self

    def advance(self, seconds: float) -> "Story":
        """Time passes, and the armed timer does not run out meanwhile."""
        self.now += seconds
        assert self.timer is None or self.timer.at > self.now, f"{self.timer} is due"
        return self

    def fire(self, name: str) -> "Story":
        """Go to the armed timer, which must be `name`, and let it fire."""
        assert self.timer is not None and self.timer.name == name, f"{name} is not armed: {self.timer}"
        self.now = max(self.now, self.timer.at)
        timer, self.timer = self.timer, None
        return self.tell(events.TimerFired(name=timer.name, serial=timer.serial))

    def answer(self, kind: type[events.Event], **fields: Any) -> "Story":
        """Answer the newest request."""
        return self.tell(kind(ticket=self.job.ticket, **fields))

    def launched(self, path: str | None = None, step: int | None = None) -> "Story":
        """From WAITING to STARTING at this resume point."""
        if self.job.attempt == 0 and self.timer is None:
            self.tell(events.Begun())
        self.fire("relaunch")
        self.answer(events.ResumePointChosen, path=path, step=step, reason="newest whole")
        return self.tell(events.Spawned(pid=10))

    def running(self, path: str | None = None, step: int | None = None, at: int | None = None) -> "Story":
        """From WAITING to RUNNING with every rank attached and at step `at`."""
        self.launched(path, step)
        for rank in range(self.world_size):
            self.tell(events.RankAttached(rank=rank, world_size=self.world_size))
        return self.progressed(at) if at is not None else self

    def progressed(self, step: int) -> "Story":
        """Every rank tells this step."""
        return self.tell(*(events.RankProgressed(rank=rank, step=step, step_s=0.1) for rank in range(self.world_size)))

    def saved(self, *ranks: int, step: int, seconds: float = 0.5) -> "Story":
        """Receipts of the flush under way."""
        assert self.job.flush is not None
        flush_id, path = self.job.flush.flush_id, f"step-{step}"
        return self.tell(
            *(events.RankSaved(rank=rank, flush_id=flush_id, step=step, path=path, seconds=seconds) for rank in ranks)
        )

    def checked(self, step: int, whole: bool = True) -> "Story":
        """The check of a flush's checkpoint is answered."""
        return self.answer(
            events.CheckpointChecked, path=f"step-{step}", step=step, whole=whole, reason="" if whole else "a file is missing"
        )

    def emptied(self, code: int, *lost: int) -> "Story":
        """These ranks go, then the leader with this code, and nothing is left."""
        return self.tell(
            *(events.RankLost(rank=rank) for rank in lost), events.LeaderExited(returncode=code), events.TreeEmptied()
        )

    def settled(self, *reports: Any, newest_step: int | None = None, jitter: float = 0.0) -> "Story":
        """What the attempt left has been read."""
        return self.answer(events.Settled, reports=reports, newest_step=newest_step, jitter=jitter)

    def crashed(self, code: int = 1, error: str = "ValueError: x", step: int = 5, newest_step: int | None = None) -> "Story":
        """Rank 0 raises at `step`, everything falls, and the attempt is judged."""
        self.tell(events.RankFailed(rank=0, step=step, error=error))
        return self.emptied(code, *range(self.world_size)).settled(newest_step=newest_step)

    def sent(self, kind: type[commands.Command]) -> list[Any]:
        """Every command of this kind so far."""
        return [command for command in self.commands if isinstance(command, kind)]
