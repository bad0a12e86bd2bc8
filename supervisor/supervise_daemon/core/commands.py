"""What the machine wants done, as imperatives. The executor performs them; answers come back as events."""

import msgspec

from supervise_hooks.contract.messages import Purpose


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base for type checking only."""


class ArmTimer(Command, frozen=True, kw_only=True):
    """Replace the one timer. `at` is monotonic seconds."""

    name: str
    serial: int
    at: float


class DisarmTimer(Command, frozen=True, kw_only=True):
    """No timer is armed any more."""


class ChooseResumePoint(Command, frozen=True, kw_only=True):
    """Clear away what an earlier attempt left, verify, choose. Answer: ResumePointChosen or ResumeRefused."""

    ticket: int
    set_aside: str | None = None
    """Move this checkpoint out of the way first: attempts that start from it keep dying."""


class Spawn(Command, frozen=True, kw_only=True):
    """Launch the attempt. Answer: Spawned or SpawnFailed."""

    attempt: int
    resume: str | None
    resume_step: int | None


class AskFlush(Command, frozen=True, kw_only=True):
    """Send a FlushRequest to every attached rank."""

    flush_id: int
    purpose: Purpose
    deadline: float
    """Monotonic seconds."""
    reason: str


class AskLeave(Command, frozen=True, kw_only=True):
    """Tell every attached rank to exit now."""

    reason: str


class CheckCheckpoint(Command, frozen=True, kw_only=True):
    """Seal and verify quickly. Answer: CheckpointChecked."""

    ticket: int
    path: str
    step: int


class Prune(Command, frozen=True, kw_only=True):
    """Apply retention; `newest` has just been proved whole."""

    newest: str


class TermTree(Command, frozen=True, kw_only=True):
    """Signal a job without hooks so that it can save by its own means."""


class KillTree(Command, frozen=True, kw_only=True):
    """SIGKILL every process of the attempt, orphans included."""


class Settle(Command, frozen=True, kw_only=True):
    """Seal what lies ready, read the launcher's failure report. Answer: Settled."""

    ticket: int
    leader_code: int


class Requeue(Command, frozen=True, kw_only=True):
    """Hand the job back. The last command of an attempt. Answer: RequeueEnded."""

    ticket: int
    reason: str
    left_s: float | None


class Tell(Command, frozen=True, kw_only=True):
    """One line for the user, and for a verb that waits."""

    text: str


class Finish(Command, frozen=True, kw_only=True):
    """Leave with this exit code."""

    exit_code: int
    reason: str
