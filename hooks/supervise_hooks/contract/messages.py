"""Messages on the Unix socket between ranks, command-line verbs and the daemon.

One JSON object a line, tagged by `type`. Files are the truth, messages are hints: a lost message may cost
time, never correctness. Unknown fields are ignored, so that versions may differ by one.
"""

from typing import Literal, TypeVar

import msgspec

from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.manifest import Metric

PROTOCOL = 1
MAX_LINE_BYTES = 1 << 20

Activity = Literal["setup", "training", "evaluating", "saving", "loading", "waiting", "finished"]
Purpose = Literal["leave", "continue"]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# --- rank -> daemon


class Hello(_Message, frozen=True, kw_only=True):
    """First message of a rank. The daemon takes pid and uid from the socket, not from here."""

    protocol: int = PROTOCOL
    version: str
    run_id: str
    attempt: int
    rank: int
    local_rank: int
    world_size: int
    checkpoints: str
    """Absolute path of the folder this script saves to."""
    keep_last: int | None = None
    keep_every: int | None = None


class Progress(_Message, frozen=True, kw_only=True):
    """At most a few a second, sent by the listener thread; never from the hot path."""

    step: int
    """Completed steps."""
    epoch: int | None = None
    activity: Activity = "training"
    step_s: float | None = None
    """Recent seconds a step."""
    values: dict[str, float] = {}
    """Latest `run.log(...)` values."""


class Resumed(_Message, frozen=True, kw_only=True):
    """The rank has loaded a checkpoint, or starts fresh (`path` empty)."""

    path: str
    step: int
    seconds: float


class Committed(_Message, frozen=True, kw_only=True):
    """The ranks agreed to save at this step; `step` None: the agreement was abandoned, `why` says so."""

    flush_id: int
    step: int | None
    why: str = ""


class Saved(_Message, frozen=True, kw_only=True):
    """This rank's receipt for `path` is on disk. `flush_id` 0: a periodic save."""

    flush_id: int
    step: int
    path: str
    size: int
    seconds: float
    metric: Metric | None = None


class NothingToSave(_Message, frozen=True, kw_only=True):
    """Asked to flush, but the state is the one of the resume point (or of a fresh start)."""

    flush_id: int
    step: int


class SaveFailed(_Message, frozen=True, kw_only=True):
    """This rank could not write its part; the previous checkpoint stands."""

    flush_id: int
    step: int
    error: str


class StrayTerm(_Message, frozen=True, kw_only=True):
    """A SIGTERM reached the rank directly: news for the daemon, not an order. A peer's crash looks just so."""

    signal: int


class Failed(_Message, frozen=True, kw_only=True):
    """An exception is ending the rank."""

    step: int
    error: str
    traceback: str


class RunCompleted(_Message, frozen=True, kw_only=True):
    """The training loop of this rank ran to its end."""

    step: int


# --- daemon -> rank


class FlushRequest(_Message, frozen=True, kw_only=True):
    """Save at a common step. Repeats with the same id only tighten the deadline."""

    flush_id: int
    purpose: Purpose
    left_s: float
    """Seconds from receipt until the ranks must be done."""
    reason: str


class Leave(_Message, frozen=True, kw_only=True):
    """Exit now, at once, without further collectives."""

    reason: str


# --- command-line verb -> daemon, and its answers


class Control(_Message, frozen=True, kw_only=True):
    """A verb typed by a user."""

    verb: Literal["flush", "preempt", "stop"]
    grace_s: float | None = None


class ControlReply(_Message, frozen=True, kw_only=True):
    """Lines for the user; the last one has `done` and an exit code."""

    text: str
    done: bool = False
    exit_code: int = 0


FromRank = (
    Hello | Progress | Resumed | Committed | Saved | NothingToSave | SaveFailed | StrayTerm | Failed | RunCompleted | Control
)
ToRank = FlushRequest | Leave | ControlReply

T = TypeVar("T")

_from_rank = msgspec.json.Decoder(FromRank)
_to_rank = msgspec.json.Decoder(ToRank)


def encode(message: msgspec.Struct) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_from_rank(line: bytes) -> FromRank:
    """What the daemon reads. Raises ContractError."""
    return _decode(_from_rank, line)


def decode_to_rank(line: bytes) -> ToRank:
    """What a rank or a verb reads. Raises ContractError."""
    return _decode(_to_rank, line)


def _decode(decoder: "msgspec.json.Decoder[T]", line: bytes) -> T:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"cannot read message {line[:80]!r}: {error}") from None


class LineBuffer:
    """Cuts a byte stream into lines; a line over MAX_LINE_BYTES is a ContractError, not a memory leak."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Whole lines completed by `chunk`, without their newline."""
        self._rest += chunk
        *lines, rest = self._rest.split(b"\n")
        if len(rest) > MAX_LINE_BYTES or any(len(line) > MAX_LINE_BYTES for line in lines):
            raise ContractError(f"cannot read message: a line is longer than {MAX_LINE_BYTES} bytes")
        self._rest = rest
        return [bytes(line) for line in lines if line]
