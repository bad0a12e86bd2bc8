"""What the end of an attempt means. Pure.

torchrun returns 1 for any worker failure and after any SIGTERM, saved or not (2.13), so its code alone decides nothing.
"""

from typing import Literal

import msgspec

from supervise_daemon.core.events import Action
from supervise_daemon.core.restart import FailureReport
from supervise_hooks.contract import exit_codes

_SIGKILL, _SIGTERM = exit_codes.from_signal(9), exit_codes.from_signal(15)
Ending = Literal["finished", "preempted", "stopped", "crashed"]


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The facts to judge by."""

    leader_code: int
    """As Popen has it: negative for signals."""
    pending: Action | None
    """The notice that was being obeyed; a plain `flush` is none."""
    flushed: bool
    """The flush for that notice ended well."""
    all_completed: bool
    """Every rank said that its loop ran to the end."""
    report: FailureReport | None
    rank_failed: bool = False
    """A rank told of the exception that ended it."""


def classify_exit(end: AttemptEnd) -> tuple[Ending, str]:
    """How the attempt ended, and why we think so."""
    if end.leader_code == 0 and end.all_completed:
        return "finished", "every rank ran its loop to the end and the command exited 0"
    if end.pending == "stop":
        return "stopped", "it was asked to stop"
    if end.pending == "preempt":
        return "preempted", f"a notice was pending when it ended; {'flushed' if end.flushed else 'nothing was flushed for it'}"
    if end.leader_code == 0 and not end.rank_failed:
        return "finished", "the command exited 0 and no notice was pending"
    if end.leader_code == 0:  # a wrapper script that goes on after a failure
        return "crashed", f"{describe_failure(0, end.report)}, though the command exited 0"
    return "crashed", describe_failure(end.leader_code, end.report)


def describe_failure(leader_code: int, report: FailureReport | None) -> str:
    """One line for people."""
    if report is None:
        return f"the command exited {leader_code}" if leader_code >= 0 else f"the command was killed by signal {-leader_code}"
    who = f"rank {report.rank}" if report.rank is not None else "the job"
    at = f" at step {report.step}" if report.step is not None else ""
    return f"{who} failed{at} with exit code {report.exit_code}" + (f": {report.error}" if report.error else "")


def merge_reports(first: FailureReport | None, reports: tuple[FailureReport, ...], leader_code: int) -> FailureReport | None:
    """One account of a failure: who fell first is what we saw ourselves, with which code is what the launcher saw.

    Launchers poll: when a peer's death drags others down within one poll, their root cause can be a victim. `first.exit_code` 0
    means unknown: then the leader's code is the best that is left, and for a rank that is the leader it is the rank's own.
    """
    if first is None:
        return reports[0] if reports else None
    told = next((report for report in reports if report.rank == first.rank), None)
    if told is None:
        known = first.exit_code or (reports[0].exit_code if reports else 0) or exit_codes.from_status(leader_code)
        return msgspec.structs.replace(first, exit_code=known or 1)
    return msgspec.structs.replace(told, error=first.error or told.error, step=told.step if first.step is None else first.step)


def was_killed(leader_code: int, report: FailureReport | None) -> bool:
    """Whether SIGKILL or SIGTERM from outside ended the job, or the rank that fell first."""
    code = report.exit_code if report is not None and report.exit_code else exit_codes.from_status(leader_code)
    return code in (_SIGKILL, _SIGTERM)


def final_code(leader_code: int, report: FailureReport | None) -> int:
    """The job's own exit code: the first failing rank's where known, else the leader's; never 0 for a failure."""
    code = report.exit_code if report is not None else exit_codes.from_status(leader_code)
    return code or 1
