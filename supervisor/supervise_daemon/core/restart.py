"""Whether, when and from where a crashed job is launched again. Pure; time and randomness are arguments.

Preemptions are not crashes and never come here. Progress resets the streak (the backoff), not the budget.
"""

import msgspec


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of how an attempt failed."""

    exit_code: int
    """The job's own: of the first rank that failed, not of its launcher. 128+n for signals."""
    rank: int | None = None
    error: str = ""
    """One line, e.g. `ValueError: ...` or `killed by SIGKILL`."""
    step: int | None = None
    """Completed steps when it failed, if known."""

    @property
    def signature(self) -> str:
        """Equal for failures that look the same."""
        return f"{self.exit_code}:{self.error}"


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How patient to be with crashes."""

    max_crashes: int = 10
    """Crashes survived within the window; one more ends the job. 0: never relaunch."""
    window_s: float = 86_400.0
    backoff_first_s: float = 1.0
    backoff_max_s: float = 300.0
    same_failure_limit: int = 2
    """This many equal failures at one step: the checkpoint below it is suspect."""


class Crash(msgspec.Struct, frozen=True, kw_only=True):
    """One crashed attempt, as remembered."""

    at: float
    """Wall seconds: the memory outlives this process."""
    signature: str
    step: int | None
    resumed_from: str | None
    started_training: bool
    newest_step: int | None
    """Newest whole checkpoint when it ended."""
    killed: bool = False
    """Ended by SIGKILL or SIGTERM: somebody outside did it (the OOM killer, an operator), so alike does not mean alike in cause."""


class Relaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Launch again after `delay_s`, first moving `set_aside` out of the way if given."""

    delay_s: float
    set_aside: str | None
    reason: str


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """The job failed for good."""

    reason: str


def decide_restart(crashes: tuple[Crash, ...], policy: RestartPolicy, jitter: float) -> Relaunch | GiveUp:
    """What to do after `crashes[-1]`. `jitter` 0..1 spreads the backoff by up to a quarter."""
    last = crashes[-1]
    recent = [crash for crash in crashes if last.at - crash.at <= policy.window_s]
    if len(recent) > policy.max_crashes:
        return GiveUp(
            reason=f"{len(recent)} crashes within {policy.window_s / 3600:g} h, {policy.max_crashes} are allowed (--max-crashes)"
        )
    same = _equal_tail(recent)
    if not last.started_training and same >= 2:
        return GiveUp(reason="it failed twice in the same way before its first step: starting again will not help")
    streak = _streak(recent)
    delay_s = min(policy.backoff_max_s, policy.backoff_first_s * 2.0 ** min(streak - 1, 30)) * (1 + jitter / 4)
    budget = f"crash {len(recent)} of {policy.max_crashes} allowed"
    if same >= policy.same_failure_limit and last.started_training and last.step is not None:
        if last.resumed_from is None:
            return GiveUp(reason=f"the same failure {same} times at step {last.step} from a fresh start: {last.signature}")
        return Relaunch(
            delay_s=delay_s,
            set_aside=last.resumed_from,
            reason=f"the same failure {same} times at step {last.step}: walking back behind {last.resumed_from} ({budget})",
        )
    return Relaunch(delay_s=delay_s, set_aside=None, reason=budget)


def _equal_tail(crashes: list[Crash]) -> int:
    """How many crashes at the end are equal in signature, step and starting point, and could be the job's own doing."""
    last = crashes[-1]
    if last.killed:
        return 1
    key = (last.signature, last.step, last.resumed_from)
    count = 0
    for crash in reversed(crashes):
        if (crash.signature, crash.step, crash.resumed_from) != key:
            break
        count += 1
    return count


def _streak(crashes: list[Crash]) -> int:
    """Crashes at the end without a newer whole checkpoint in between."""
    last = crashes[-1]
    count = 0
    for crash in reversed(crashes):
        if crash.newest_step != last.newest_step:
            break
        count += 1
    return count
