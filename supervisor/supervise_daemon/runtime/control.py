"""Verbs typed by a user (`flush`, `preempt`, `stop`) on their way through the daemon: in as notices, back as lines of text."""

from supervise_daemon.core.events import NoticeArrived
from supervise_daemon.core.job import Job, Phase
from supervise_daemon.job_spec import JobSpec
from supervise_daemon.runtime.rank_server import Peer, RankServer
from supervise_hooks.contract import exit_codes, messages


class Controls:
    """Verbs that wait for their answer."""

    def __init__(self, server: RankServer) -> None:
        self._server = server
        self._waiting: list[tuple[Peer, messages.Control, int]] = []

    def heard(self, peer: Peer, message: messages.FromRank, job: Job, spec: JobSpec) -> NoticeArrived | None:
        """The notice a verb stands for."""
        if not isinstance(message, messages.Control):
            return None
        self._waiting.append((peer, message, job.attempt))
        grace_s = message.grace_s if message.grace_s is not None else spec.grace_s
        return NoticeArrived(
            source=f"supervise {message.verb}", action=message.verb, grace_s=grace_s, exit_code=exit_codes.FINISHED
        )

    def tell(self, text: str) -> None:
        """Pass a line on to whoever waits."""
        for peer, _, _ in self._waiting:
            self._server.reply(peer, messages.ControlReply(text=text))

    def follow(self, job: Job, reason: str, told: bool) -> None:
        """After each step: answer the verbs that are done by it."""
        still = []
        for peer, control, attempt in self._waiting:
            code = verb_done(control.verb, attempt, job, told)
            if code is None:
                still.append((peer, control, attempt))
            else:
                self._server.reply(peer, messages.ControlReply(text="" if told else reason, done=True, exit_code=code))
        self._waiting = still


def verb_done(verb: str, attempt: int, job: Job, told: bool) -> int | None:
    """Exit code of a verb once its end is seen; None while it goes on. Pure.

    `told`: the step just made told something, which is how a flush in RUNNING ends, well or not.
    """
    if job.phase is Phase.ENDED:
        return exit_codes.FINISHED if verb != "flush" else 1
    if verb == "flush":
        return (exit_codes.FINISHED if job.flush_ok else 1) if job.phase is not Phase.FLUSHING and told else None
    if verb == "preempt":
        return exit_codes.FINISHED if job.attempt > attempt and job.phase in (Phase.RUNNING, Phase.STARTING) else None
    return None
