"""Rounds of the agreement as they happen: the watcher thread, deadlines, and where the training loop waits and answers.

The protocol itself is in `agreement`, its keys travel by `store`, the loop is stopped by `gate`. What a round is for, and
what the loop does at the common step, is the session's.
"""

import threading
import time
from collections.abc import Callable

import msgspec

from supervise_hooks.agreement import Participant, Purpose, Request, request_key, satisfies
from supervise_hooks.contract.messages import Committed, NothingToSave, Saved, SaveFailed
from supervise_hooks.gate import Gate
from supervise_hooks.store import Store, StoreLost

_STUCK_S = 5.0
"""How long beyond the deadline the loop waits for its own watcher, which may be stuck in a dead network."""

Answer = Saved | NothingToSave | SaveFailed


class Member(msgspec.Struct, frozen=True):
    """Who takes part."""

    rank: int
    world_size: int
    origin: str = ""
    """The daemon of this rank; empty when alone."""


class Ask:
    """One wish for a save that this rank was told of itself."""

    def __init__(self, purpose: Purpose, reason: str, deadline: float, flush_id: int) -> None:
        self.purpose = purpose
        self.reason = reason
        self.deadline = deadline
        self.flush_id = flush_id


class Round:
    """One round as this rank sees it. Changed only under the condition of its `Rounds`."""

    def __init__(self, number: int, request: Request, promise: int, deadline: float) -> None:
        self.number = number
        self.request = request
        self.promise = promise
        self.deadline = deadline
        self.target: int | None = None
        """The common step, once committed."""
        self.over = False
        """Answered, or abandoned."""


class Callbacks(msgspec.Struct, frozen=True):
    """What the watcher calls; never under its lock."""

    send: Callable[[msgspec.Struct], None]
    committed: Callable[[Round], None]
    """The common step is known; the loop may be in no position to serve it (set-up, ended)."""
    abandoned: Callable[[Purpose, str], None]
    """There is no common step, for this reason; the gate is open again."""


class Rounds:
    """Asks for rounds, takes part in all of them, one after the other."""

    def __init__(self, member: Member, gate: Gate, store: Store, callbacks: Callbacks) -> None:
        self._member = member
        self._gate = gate
        self._store = store
        self._callbacks = callbacks
        self._changed = threading.Condition()
        self._asks: list[Ask] = []
        self._known: set[int] = set()
        self._active: Round | None = None
        self._next = 1
        self._lost = ""

    def start(self) -> None:
        """Begin to watch for requests of any rank."""
        threading.Thread(target=self._watch, name="supervise-watcher", daemon=True).start()

    def ask(self, purpose: Purpose, reason: str, left_s: float, flush_id: int = 0) -> None:
        """Have all ranks save at a common step within `left_s`. The same `flush_id` again only tightens. From any thread."""
        deadline = time.monotonic() + left_s
        with self._changed:
            if flush_id and flush_id in self._known:
                self._tighten(flush_id, deadline)
                return
            ask = Ask(purpose, reason, deadline, flush_id)
            self._asks.append(ask)
            self._known.add(flush_id)
            active = self._active
            joined = active is not None and not active.over and satisfies(active.request.purpose, purpose)
            waiting = active is not None and not active.over
            if joined and active is not None:
                active.deadline = min(active.deadline, deadline)
            target = active.target if joined and active is not None else None
            lost = self._lost
        if lost:
            self._abandon(purpose, lost)
        elif target is not None and flush_id:
            self._callbacks.send(Committed(flush_id=flush_id, step=target))
        elif not waiting:
            self._post(ask)

    def due(self, boundary: int) -> Round | None:
        """The round that saves at this boundary, if any. Waits while this rank's promise for it is not decided yet."""
        with self._changed:
            active = self._active
            if active is None:
                return None
            decided = active.promise > boundary or self._wait_decided(active)
        if not decided:
            self._drop(active, "the store did not answer in time")
        with self._changed:
            served = not active.over or active.request.purpose == "leave"
            return active if served and active.target is not None and active.target <= boundary else None

    def unreached(self, boundary: int) -> Round | None:
        """A committed round whose step lies beyond `boundary`: where the loop has ended, it can only be answered."""
        with self._changed:
            active = self._active
            beyond = active is not None and not active.over and active.target is not None and active.target > boundary
            return active if beyond else None

    def left_s(self, active: Round) -> float:
        """Seconds left for a round."""
        return active.deadline - time.monotonic()

    def finish(self, active: Round, answer: Answer) -> bool:
        """Answer everybody who asked, open the gate, and begin the next round if somebody wants more. First call wins."""
        with self._changed:
            if active.over:
                return False
            active.over = True
            if active.request.purpose != "leave":  # who is to leave stays at this boundary
                self._gate.aim()
            answered = [ask for ask in self._asks if satisfies(active.request.purpose, ask.purpose)]
            self._asks = [ask for ask in self._asks if ask not in answered]
            following = min(self._asks, key=lambda ask: (ask.purpose != "leave", ask.deadline), default=None)
            self._next = active.number + 1
            self._changed.notify_all()
        ids = sorted({ask.flush_id for ask in answered if ask.flush_id})
        for flush_id in ids:
            self._callbacks.send(msgspec.structs.replace(answer, flush_id=flush_id))
        if not ids and not isinstance(answer, NothingToSave):
            self._callbacks.send(answer)
        if following is not None:
            self._post(following)
        return True

    # --- the watcher thread

    def _watch(self) -> None:
        try:
            while True:
                number = self._next
                request = msgspec.json.decode(self._store.watch(request_key(number)), type=Request)
                active = self._open(number, request)
                outcome = self._decide(active)
                self._obey(active, outcome)
                with self._changed:
                    self._changed.wait_for(lambda over=active: over.over)  # type: ignore[misc]
        except StoreLost as error:
            self._lose(str(error))

    def _open(self, number: int, request: Request) -> Round:
        """Promise. Under the condition, so that a loop stopped by the gate finds the round it was stopped for."""
        deadline = time.monotonic() + request.left_s
        with self._changed:
            ours = bool(request.flush_id) and request.origin == self._member.origin
            if ours and request.flush_id not in self._known:
                self._known.add(request.flush_id)
                self._asks.append(Ask(request.purpose, request.reason, deadline, request.flush_id))
            for ask in self._asks:
                if satisfies(request.purpose, ask.purpose):
                    deadline = min(deadline, ask.deadline)
            self._active = active = Round(number, request, self._gate.promise(), deadline)
        return active

    def _decide(self, active: Round) -> int | None:
        member = self._member
        participant = Participant(active.number, member.rank, member.world_size, active.promise)
        while (op := participant.op()) is not None:
            participant = participant.heard(self._store.perform(op, lambda: self.left_s(active)))
        return participant.outcome

    def _obey(self, active: Round, outcome: int | None) -> None:
        if outcome is None:
            self._drop(active, "not every rank promised a step in time")
            return
        with self._changed:
            if active.over:  # the loop gave up on us and went on
                return
            self._gate.aim(outcome)
            active.target = outcome
            ids = [ask.flush_id for ask in self._asks if ask.flush_id and satisfies(active.request.purpose, ask.purpose)]
            self._changed.notify_all()
        for flush_id in ids:
            self._callbacks.send(Committed(flush_id=flush_id, step=outcome))
        self._callbacks.committed(active)

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost = why
            active = self._active
            asks = list(self._asks)
        if active is not None and not active.over and active.target is None:
            self._drop(active, why)
        elif asks and (active is None or active.over):
            self._abandon(asks[0].purpose, why)

    def _wait_decided(self, active: Round) -> bool:
        """The loop holds at its promise. False: the watcher itself is stuck. Called under the condition."""
        while not (active.over or active.target is not None):
            left = active.deadline + _STUCK_S - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    # --- endings without a common step

    def _drop(self, active: Round, why: str) -> None:
        with self._changed:
            active.over = True
            self._gate.aim()
            self._next = active.number + 1
            self._changed.notify_all()
        self._abandon(active.request.purpose, why)

    def _abandon(self, purpose: Purpose, why: str) -> None:
        with self._changed:
            given_up = [ask for ask in self._asks if satisfies(purpose, ask.purpose)]
            self._asks = [ask for ask in self._asks if ask not in given_up]
            following = next(iter(self._asks), None) if not self._lost else None
        for ask in given_up:
            if ask.flush_id:
                self._callbacks.send(Committed(flush_id=ask.flush_id, step=None, why=why))
        self._callbacks.abandoned(purpose, why)
        if following is not None:
            self._post(following)

    def _tighten(self, flush_id: int, deadline: float) -> None:
        for ask in self._asks:
            if ask.flush_id == flush_id:
                ask.deadline = min(ask.deadline, deadline)
                if self._active is not None and satisfies(self._active.request.purpose, ask.purpose):
                    self._active.deadline = min(self._active.deadline, deadline)
        self._changed.notify_all()

    def _post(self, ask: Ask) -> None:
        request = Request(
            purpose=ask.purpose,
            reason=ask.reason,
            left_s=max(0.0, ask.deadline - time.monotonic()),
            origin=self._member.origin,
            flush_id=ask.flush_id,
        )
        try:
            self._store.post(request_key(self._next), msgspec.json.encode(request).decode())
        except StoreLost as error:
            with self._changed:
                self._lost = str(error)
            self._abandon(ask.purpose, str(error))
