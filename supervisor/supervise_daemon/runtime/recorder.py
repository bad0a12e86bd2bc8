"""Keeps the record: the journal (every event and decision), the memory of the run, and status.json. Decides nothing."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core import commands, events
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.core.restart import FailureReport
from supervise_daemon.runtime.clock import Clock
from supervise_daemon.runtime.journal import Journal, Memory
from supervise_daemon.runtime.rank_server import Peer
from supervise_daemon.runtime.scribe import Scribe
from supervise_daemon.runtime.status import FailureStatus, RankStatus, Status, encode_status
from supervise_hooks.contract import durable, messages

_PUBLISH_S = 1.0
"""Progress alone is published at most this often."""
_OUTPUT_LINES = 20


class Recorder:
    """Owns journal, memory and status of a run."""

    def __init__(self, journal: Journal, memory: Memory, status: Status, status_path: Path, scribe: Scribe, clock: Clock) -> None:
        self.journal = journal
        self.scribe = scribe
        self.memory = memory
        self.status = status
        self.status_path = status_path
        self.clock = clock
        self.publish_at: float | None = None
        """When a held-back publication is due."""
        self.output_tail: Callable[[], str] = str
        self.complain: Callable[[str], None] = lambda text: None
        self._complained = False
        self._tracebacks: dict[int, str] = {}

    # --- what ranks say, for people

    def heard(self, peer: Peer, message: messages.FromRank) -> None:
        """Fold a rank's message into the status."""
        if peer.hello is None:
            return
        rank = self.status.ranks.setdefault(str(peer.hello.rank), RankStatus(pid=peer.pid))
        match message:
            case messages.Hello():
                rank.pid, rank.attached, rank.activity = peer.pid, True, "setup"
                self.status.world_size = message.world_size
                self._learn_checkpoints(message)
            case messages.Progress():
                rank.step, rank.epoch, rank.activity, rank.values = message.step, message.epoch, message.activity, message.values
            case messages.Failed():
                self._tracebacks[peer.hello.rank] = message.traceback
            case messages.Saved():
                self.status.newest_path = message.path
        if self.publish_at is None:
            self.publish_at = self.clock.now() + _PUBLISH_S

    def _learn_checkpoints(self, hello: messages.Hello) -> None:
        self.status.checkpoints = hello.checkpoints
        if self.memory.checkpoints != hello.checkpoints:
            self.remember(checkpoints=hello.checkpoints)

    # --- the machine's steps

    def record(self, before: Job, event: events.Event, after: Job, done: tuple[commands.Command, ...], reason: str) -> None:
        """One journal line for a step; progress reports are too many and say nothing that matters later."""
        if not isinstance(event, events.RankProgressed):
            self.journal.append(
                "step",
                self.clock.wall(),
                attempt=after.attempt,
                phase=after.phase,
                event=event,
                commands=[command for command in done if not isinstance(command, commands.DisarmTimer)],
                reason=reason,
            )
        if after.crashes != before.crashes or after.preemptions != before.preemptions or after.set_aside != before.set_aside:
            self.remember(crashes=after.crashes, preemptions=after.preemptions, set_aside=after.set_aside)
        if after.newest_step is not None and not self.memory.ever_whole:
            self.remember(ever_whole=True)
        if before.phase is Phase.SETTLING and after.phase is not Phase.SETTLING:
            self._account(before, after, reason)

    def remember(self, **changes: object) -> None:
        """Change the memory, durably."""
        self.memory = msgspec.structs.replace(self.memory, **changes)
        self.journal.remember(self.memory, self.clock.wall())

    def _account(self, before: Job, after: Job, reason: str) -> None:
        """What the attempt lost and, if it failed, how."""
        lost = max(0, (before.step or 0) - (after.newest_step or 0)) if after.outcome != "SUCCEEDED" else 0
        self.status.lost_steps_total += lost
        self._tracebacks, tracebacks = {}, self._tracebacks
        if len(after.crashes) == len(before.crashes) and after.outcome != "FAILED":
            return
        failure = after.failure or FailureReport(exit_code=after.exit_code or 1)
        self.status.failure = FailureStatus(
            attempt=after.attempt,
            what=reason,
            rank=failure.rank,
            exit_code=failure.exit_code,
            step=failure.step if failure.step is not None else before.step,
            traceback=tracebacks.get(failure.rank, "") if failure.rank is not None else "",
            lost_steps=lost,
            output=self.output_tail().splitlines()[-_OUTPUT_LINES:],
        )

    # --- status.json

    def publish(self, job: Job, reason: str, *, changed: bool) -> None:
        """Write the status now if something changed, else soon."""
        status = self.status
        if job.attempt != status.attempt:
            status.ranks = {}
        status.phase, status.attempt = job.phase, job.attempt
        status.resume, status.resume_step = job.resume, job.resume_step
        status.step, status.step_s, status.newest_step = job.step, job.step_s, job.newest_step
        status.crashes, status.preemptions = len(job.crashes), job.preemptions
        status.outcome, status.exit_code = job.outcome, job.exit_code
        status.notice = None if job.notice is None else f"{', '.join(job.notice.sources)} ({job.notice.action})"
        left_s = None if job.notice is None else job.notice.deadline - self.clock.now()
        status.deadline_at = None if left_s is None else self.clock.wall() + left_s
        for name, rank in status.ranks.items():
            rank.attached = int(name) not in job.lost
        if changed:
            status.reason, status.next = reason, what_next(job)
            self._write()
        elif self.publish_at is None:
            self.publish_at = self.clock.now() + _PUBLISH_S

    def publish_if_due(self, job: Job, now: float) -> None:
        """Write what was held back."""
        if self.publish_at is not None and self.publish_at <= now:
            self._write()

    def _write(self) -> None:
        self.publish_at = None
        self.status.changed_at = self.clock.wall()
        content = encode_status(self.status)
        self.scribe.write(lambda: self._replace(content), key="status")

    def _replace(self, content: bytes) -> None:
        try:
            durable.write(self.status_path, content, mode=0o600)
        except OSError as error:  # a full disk must not end the job
            if not self._complained:
                self._complained = True
                self.complain(f"cannot write {self.status_path}: {error.strerror}; going on without a status file")


def what_next(job: Job) -> str:
    """One line on what follows from the phase. Pure."""
    match job.phase:
        case Phase.WAITING:
            return f"attempt {job.attempt + 1} is launched"
        case Phase.STARTING:
            return "training begins when every rank has attached"
        case Phase.RUNNING:
            return "training goes on; at a notice every rank is asked to save" if job.hooked else "training goes on without hooks"
        case Phase.FLUSHING:
            leave = job.flush is None or job.flush.purpose == "leave"
            return "the checkpoint is verified, then the ranks leave" if leave else "training goes on after the save"
        case Phase.STOPPING:
            return "the tree is killed if it does not end by itself"
        case Phase.KILLING | Phase.SETTLING:
            return "the attempt is judged when the tree is empty"
        case Phase.REQUEUEING:
            return "the job is handed back"
        case Phase.ENDED:
            return "run the same command again to go on" if job.outcome in ("REQUEUED", "STOPPED") else "nothing"
