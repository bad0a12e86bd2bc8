"""What a run is: the result of reading flags, environment and files. Plain data; `config` makes it, the runtime obeys it."""

from pathlib import Path

import msgspec

from supervise_daemon.core.events import Action
from supervise_daemon.core.job import Limits
from supervise_hooks.contract.retention import Retention


class SignalRule(msgspec.Struct, frozen=True):
    """What a signal to the supervisor means."""

    number: int
    name: str
    action: Action
    grace_s: float


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run."""

    argv: tuple[str, ...]
    name: str
    run_id: str
    run_root: Path
    checkpoints: Path | None
    """Folder of checkpoints, absolute; None: learned from the ranks."""
    grace_s: float
    signals: tuple[SignalRule, ...]
    ignored_signals: tuple[int, ...] = ()
    """Absorbed: left alone they would act by default, and end us."""
    notice_file: Path | None
    launcher: str
    requeue: str
    relaunch_delay_s: float
    resume_argument: tuple[str, ...]
    on_supervisor_death: str
    fresh: bool
    wait_for_old_s: float
    retention: Retention
    retention_given: bool
    """Whether the user said so here: then it beats what the script says."""
    limits: Limits
    quiet: bool = False
