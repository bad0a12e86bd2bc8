"""How ranks choose the one step at which all of them save: a pure state machine over a few keys of a shared store.

One round, "promise, then commit". Each rank's thread promises a boundary at which its loop will stop, writes it, and counts
itself. Whoever counts last reads all promises and decides for the largest. One key decides, by compare-and-set: the first
value stays, be it a step or "abort" by a rank that ran out of time, and everybody obeys what is there. A rank that holds at
its own, smaller promise then goes on to the common step; nobody is past it, because nobody passes its promise.

No collectives and no main threads are needed to decide, so a rank stuck in a collective cannot block it. Transport is in
`store`, threads and deadlines in `rounds`; gate and loop in `gate`.
"""

from typing import Literal, assert_never

import msgspec

ABORT = "abort"

Purpose = Literal["leave", "continue", "periodic"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Why a round was begun; written once, read by every rank."""

    purpose: Purpose
    reason: str
    left_s: float
    """Seconds from reading it until the ranks must be done."""
    origin: str = ""
    """Which daemon asked, so that its other ranks know the order when they hear it again."""
    flush_id: int = 0


class Put(msgspec.Struct, frozen=True):
    """Write a key of this rank's own. The reply means nothing."""

    key: str
    value: str


class Count(msgspec.Struct, frozen=True):
    """Add one to a counter. The reply is its new value."""

    key: str


class ReadAll(msgspec.Struct, frozen=True):
    """Read keys that are known to exist. The reply is their values."""

    keys: tuple[str, ...]


class Decide(msgspec.Struct, frozen=True):
    """Write `value` if the key is not there yet. The reply is what is there now."""

    key: str
    value: str


class Await(msgspec.Struct, frozen=True):
    """Wait for a key. The reply is its value, or None when there is no time left."""

    key: str


Op = Put | Count | ReadAll | Decide | Await
Reply = int | str | tuple[str, ...] | None

Stage = Literal["promising", "counting", "reading", "deciding", "waiting", "aborting", "done"]


class Participant(msgspec.Struct, frozen=True):
    """One rank in one round, after its thread has obtained `promise` from the gate."""

    number: int
    rank: int
    world_size: int
    promise: int
    stage: Stage = "promising"
    proposal: int = -1
    outcome: int | None = None
    """The common step, once `stage` is done; None: aborted."""

    def op(self) -> Op | None:
        """What to do on the store next; None when done."""
        commit = commit_key(self.number)
        match self.stage:
            case "promising":
                return Put(promise_key(self.number, self.rank), str(self.promise))
            case "counting":
                return Count(count_key(self.number))
            case "reading":
                return ReadAll(tuple(promise_key(self.number, rank) for rank in range(self.world_size)))
            case "deciding":
                return Decide(commit, str(self.proposal))
            case "waiting":
                return Await(commit)
            case "aborting":
                return Decide(commit, ABORT)
            case "done":
                return None
            case _:
                assert_never(self.stage)

    def heard(self, reply: Reply) -> "Participant":
        """The participant after the store answered its `op`."""
        match self.stage:
            case "promising":
                return self._at("counting")
            case "counting":
                return self._at("reading" if reply == self.world_size else "waiting")
            case "reading":
                assert isinstance(reply, tuple)
                return msgspec.structs.replace(self, stage="deciding", proposal=max(map(int, reply)))
            case "waiting" if reply is None:
                return self._at("aborting")
            case "deciding" | "waiting" | "aborting":
                return msgspec.structs.replace(self, stage="done", outcome=None if reply == ABORT else int(str(reply)))
            case _:
                raise ValueError(f"cannot hear {reply!r}: the round is over")

    def _at(self, stage: Stage) -> "Participant":
        return msgspec.structs.replace(self, stage=stage)


def request_key(number: int) -> str:
    """Key that begins round `number`."""
    return f"request/{number}"


def promise_key(number: int, rank: int) -> str:
    """Key of one rank's promise."""
    return f"promise/{number}/{rank}"


def count_key(number: int) -> str:
    """Counter of ranks that have promised."""
    return f"promised/{number}"


def commit_key(number: int) -> str:
    """The one key that decides a round."""
    return f"commit/{number}"


def satisfies(done: Purpose, asked: Purpose) -> bool:
    """Whether a round held for `done` also answers a request for `asked`."""
    return done == "leave" or asked != "leave"
