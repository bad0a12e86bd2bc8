"""What can happen to a job, as past-tense facts. The only input of the machine.

`ticket` ties an answer to the request it answers: answers to older requests are ignored.
"""

from typing import Literal

import msgspec

from supervise_daemon.core.restart import FailureReport

Action = Literal["preempt", "stop", "flush"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base for type checking only."""


class Begun(Event, frozen=True, kw_only=True):
    """The supervisor is ready to look after the job."""


class ResumePointChosen(Event, frozen=True, kw_only=True):
    """The next attempt starts from `path`, or fresh when None."""

    ticket: int
    path: str | None
    step: int | None
    reason: str


class ResumeRefused(Event, frozen=True, kw_only=True):
    """Nothing may be launched: starting would lose or overwrite something."""

    ticket: int
    reason: str
    exit_code: int


class Spawned(Event, frozen=True, kw_only=True):
    """The leader runs."""

    pid: int


class SpawnFailed(Event, frozen=True, kw_only=True):
    """The command could not be started at all."""

    error: str
    exit_code: int


class RankAttached(Event, frozen=True, kw_only=True):
    """A rank said hello."""

    rank: int
    world_size: int


class RankProgressed(Event, frozen=True, kw_only=True):
    """A rank told its step."""

    rank: int
    step: int
    step_s: float | None = None


class RankCompleted(Event, frozen=True, kw_only=True):
    """The training loop of a rank ran to its end."""

    rank: int
    step: int


class RankFailed(Event, frozen=True, kw_only=True):
    """An exception is ending a rank."""

    rank: int
    step: int
    error: str


class RankLost(Event, frozen=True, kw_only=True):
    """A rank's connection closed."""

    rank: int


class RankTermed(Event, frozen=True, kw_only=True):
    """A rank got a SIGTERM of its own: a peer's crash, or somebody signalled the whole tree."""

    rank: int


class RankCommitted(Event, frozen=True, kw_only=True):
    """The ranks agreed on a step to save at (None: they gave up, `why`)."""

    rank: int
    flush_id: int
    step: int | None
    why: str


class RankSaved(Event, frozen=True, kw_only=True):
    """A rank's receipt is on disk; `flush_id` 0 is a periodic save."""

    rank: int
    flush_id: int
    step: int
    path: str
    seconds: float


class RankHadNothing(Event, frozen=True, kw_only=True):
    """Asked to flush, but the state is that of the resume point."""

    rank: int
    flush_id: int
    step: int


class RankSaveFailed(Event, frozen=True, kw_only=True):
    """A rank could not write its part."""

    rank: int
    flush_id: int
    step: int
    error: str


class CheckpointChecked(Event, frozen=True, kw_only=True):
    """A checkpoint was sealed and verified, or found not whole."""

    ticket: int
    path: str
    step: int
    whole: bool
    reason: str


class NoticeArrived(Event, frozen=True, kw_only=True):
    """Word that the machine will be taken, or that a user wants something."""

    source: str
    action: Action
    grace_s: float
    exit_code: int = 75
    """What `supervise` exits with when a `stop` comes to its end."""


class NoticeWithdrawn(Event, frozen=True, kw_only=True):
    """The source takes its word back."""

    source: str


class LeaderExited(Event, frozen=True, kw_only=True):
    """The process we spawned is gone; negative: killed by that signal."""

    returncode: int


class TreeEmptied(Event, frozen=True, kw_only=True):
    """No process of the attempt is left."""


class Settled(Event, frozen=True, kw_only=True):
    """What the finished attempt left behind has been read and sealed."""

    ticket: int
    reports: tuple[FailureReport, ...]
    """What the launcher tells of its ranks, its root cause first; may be empty."""
    newest_step: int | None
    """Step of the newest whole checkpoint of this run."""
    jitter: float
    """0..1, for the backoff: randomness comes from outside."""


class RequeueEnded(Event, frozen=True, kw_only=True):
    """The requeue backend answered."""

    ticket: int
    accepted: bool
    relaunch_in_s: float | None
    """Not None: nobody else will start us, launch again here after this pause."""
    detail: str


class TimerFired(Event, frozen=True, kw_only=True):
    """The armed timer of a phase ran out. Ignored if the phase or attempt has moved on."""

    name: str
    serial: int
