"""The job as a value: phase, attempt, ranks, notice, flush, memory of crashes. Immutable; `machine` makes new ones."""

from enum import StrEnum
from typing import Literal

import msgspec

from supervise_daemon.core.events import Action
from supervise_daemon.core.restart import Crash, FailureReport, RestartPolicy
from supervise_hooks.contract.messages import Purpose


class Phase(StrEnum):
    """Where an attempt is. The diagram in supervisor/README.md is generated from the machine's table."""

    WAITING = "WAITING"
    """No tree; the relaunch timer or the choice of a resume point is running."""
    STARTING = "STARTING"
    """The leader runs, not every rank has attached yet."""
    RUNNING = "RUNNING"
    FLUSHING = "FLUSHING"
    """Ranks were asked to save."""
    STOPPING = "STOPPING"
    """The tree is expected to end by itself."""
    KILLING = "KILLING"
    SETTLING = "SETTLING"
    """The tree is gone; reading what it left."""
    REQUEUEING = "REQUEUEING"
    ENDED = "ENDED"


Outcome = Literal["SUCCEEDED", "FAILED", "STOPPED", "REQUEUED"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on each phase, in seconds, and the restart policy: all the configuration the machine needs."""

    attach_s: float = 60.0
    """After this without every rank attached, the job runs unhooked, and that is said."""
    collapse_s: float = 3.0
    """From the loss of a rank to the kill of the rest: time for the launcher to notice and report."""
    leave_s: float = 5.0
    """From `Leave` to the kill."""
    stray_s: float = 1.0
    """A rank got a SIGTERM and no peer was lost for so long: then it was a notice."""
    kill_s: float = 15.0
    settle_s: float = 60.0
    choose_s: float = 300.0
    """Choosing a resume point may take longer (full digests of a big checkpoint): it is only reported."""
    requeue_s: float = 60.0
    default_grace_s: float = 30.0
    restart: RestartPolicy = RestartPolicy()


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The notice being obeyed: merged from all that arrived."""

    sources: tuple[str, ...]
    action: Action
    deadline: float
    """Monotonic seconds."""
    exit_code: int


class Flush(msgspec.Struct, frozen=True, kw_only=True):
    """A flush under way."""

    flush_id: int
    purpose: Purpose
    flush_by: float
    stop_by: float
    step: int | None = None
    path: str | None = None
    answered: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    failed: tuple[str, ...] = ()
    done: bool = False
    """It ended well: verified whole, or there was nothing new to save."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the machine knows."""

    limits: Limits
    phase: Phase = Phase.WAITING
    attempt: int = 0
    ticket: int = 0
    """Number of the newest request to the world; older answers are stale."""
    serial: int = 0
    """Number of the newest timer; older ones are stale."""
    due: float | None = None
    """When the armed timer runs out, monotonic; None: none is armed."""
    flushes: int = 0
    resume: str | None = None
    resume_step: int | None = None
    set_aside: str | None = None
    world_size: int | None = None
    attached: frozenset[int] = frozenset()
    completed: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    step: int | None = None
    """Highest completed step heard of in this attempt."""
    step_s: float | None = None
    save_s: float | None = None
    failure: FailureReport | None = None
    """Who fell first, as we saw it; exit code 0: not known."""
    ran: bool = False
    """The attempt has reached RUNNING."""
    termed: bool = False
    """A rank got a SIGTERM that did not come from us."""
    leave_asked: bool = False
    saves: tuple[tuple[str, frozenset[int]], ...] = ()
    """Periodic saves under way: path and the ranks whose receipts are in."""
    notice: Notice | None = None
    flush: Flush | None = None
    flush_ok: bool = False
    """How the last request to flush ended; a refused one ended badly."""
    leader_code: int | None = None
    newest_step: int | None = None
    """Step of the newest checkpoint proved whole."""
    crashes: tuple[Crash, ...] = ()
    preemptions: int = 0
    outcome: Outcome | None = None
    exit_code: int | None = None

    @property
    def hooked(self) -> bool:
        """Every rank of the world has attached."""
        return self.world_size is not None and len(self.attached) == self.world_size

    @property
    def all_completed(self) -> bool:
        """Every rank's loop ran to its end."""
        return self.hooked and self.completed == self.attached
