"""The Protocol of every seam, on one page. `assembly` alone names the classes behind them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from supervise_daemon.core.events import NoticeArrived
from supervise_daemon.core.restart import FailureReport
from supervise_hooks.contract.verification import Depth, Inspection


class LaunchContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher may need to know of the coming attempt."""

    attempt: int
    resume: str | None
    resume_argument: tuple[str, ...]
    """Template appended to the command when there is a resume point, e.g. ("--resume", "{path}"); empty: never."""
    attempt_dir: Path
    grace_s: float


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the attempt."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    """Added to the environment."""
    notes: tuple[str, ...] = ()
    """What the user should know, e.g. an option that works against us."""


class Launcher(Protocol):
    """Knows one way of starting ranks. Pure."""

    name: str

    def recognises(self, argv: tuple[str, ...]) -> bool:
        """Whether `argv` is started by this launcher."""

    def plan(self, argv: tuple[str, ...], context: LaunchContext) -> LaunchPlan:
        """The command and environment of an attempt. `argv` is the user's, words unchanged."""

    def read_failures(self, output: str, leader_code: int) -> tuple[FailureReport, ...]:
        """What the launcher told of failed ranks in the tail of its output, root cause first; may be empty."""


class NoticeSource(Protocol):
    """A place to look for notices now and then. Signals come by the loop itself."""

    name: str
    poll_s: float
    """A declared wake-up."""

    def poll(self) -> NoticeArrived | None:
        """A notice, once for each occurrence. Quick, never raises for a broken source: says so once and goes on."""


class Format(Protocol):
    """Knows one checkpoint format. Reads bytes, never imports torch, never unpickles."""

    name: str

    def recognises(self, path: Path) -> bool:
        """Whether `path` looks like this format, whole or torn."""

    def inspect(self, path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Inspection:
        """The verdict. Everything found on disk is a problem or caveat in it, never an exception."""


class Requeued(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a requeue."""

    accepted: bool
    relaunch_in_s: float | None
    """Not None: nobody else starts us, launch here again after this pause."""
    detail: str


class Requeue(Protocol):
    """Hands a preempted job back."""

    name: str

    def requeue(self, reason: str, left_s: float | None) -> Requeued:
        """Runs in a worker thread; bounded in time."""
