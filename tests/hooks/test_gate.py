"""The gate's promise: every interleaving of loop and thread on a model, and the real thing under fast thread switches."""

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from supervise_hooks.gate import NEVER, Gate

# --- the model: main and thread as generators of atomic accesses; state is (next_check, at, stops, promise)


class Model:
    """Shared variables of one interleaving, replayed from its schedule."""

    def __init__(self) -> None:
        self.next_check = 0
        self.at = 1 << 30
        self.promise: int | None = None
        self.stops: list[int] = []
        self.boundary = 0


Actor = Callable[[Model], Iterator[None]]
LAST = 2


def loop(model: Model) -> Iterator[None]:
    """The loop of `Session.steps`: each yield ends one atomic access."""
    for boundary in range(LAST + 1):
        model.boundary = boundary
        model.next_check = boundary + 1
        yield
        at = model.at
        yield
        if at <= boundary:
            model.stops.append(boundary)


def loop_reads_first(model: Model) -> Iterator[None]:
    """Planted bug: the gate is read before `next_check` is written."""
    for boundary in range(LAST + 1):
        model.boundary = boundary
        at = model.at
        yield
        model.next_check = boundary + 1
        yield
        if at <= boundary:
            model.stops.append(boundary)


def loop_with_evaluation(model: Model) -> Iterator[None]:
    """A loop that is parked at boundary 1 for a while, and checks it again afterwards."""
    parked = False
    for boundary in (0, 1, 1, 2):
        model.boundary = boundary
        model.next_check = boundary + 1
        yield
        at = model.at
        yield
        if at <= boundary:
            model.stops.append(boundary)
        if boundary == 1 and not parked:
            parked = True
            model.next_check = 1
            yield


def promising(model: Model) -> Iterator[None]:
    """The thread: `Gate.promise`."""
    while True:
        boundary = model.next_check
        yield
        model.at = boundary
        yield
        again = model.next_check
        yield
        if again <= boundary:
            model.promise = boundary
            return


def promising_once(model: Model) -> Iterator[None]:
    """Planted bug: no second look."""
    boundary = model.next_check
    yield
    model.at = boundary
    yield
    model.promise = boundary


def promising_the_past(model: Model) -> Iterator[None]:
    """Planted bug: promises the boundary before the next check."""
    while True:
        boundary = model.next_check - 1
        yield
        model.at = boundary
        yield
        if model.next_check <= boundary + 1:
            model.promise = boundary
            return
        yield


def broken_promises(main: Actor, thread: Actor) -> list[str]:
    """Every interleaving: a promise made for a boundary that the loop reaches must find the loop stopped there."""
    broken = []
    schedules: list[tuple[int, ...]] = [()]
    while schedules:
        schedule = schedules.pop()
        model = Model()
        actors: list[Iterator[None] | None] = [main(model), thread(model)]
        for turn in schedule:
            actor = actors[turn]
            if actor is not None and next(actor, "end") == "end":
                actors[turn] = None
        alive = [turn for turn in (0, 1) if actors[turn] is not None]
        if not alive:
            if model.promise is not None and model.promise <= LAST and model.promise not in model.stops:
                broken.append(f"promised {model.promise}, stopped at {model.stops}: {schedule}")
        schedules += [(*schedule, turn) for turn in alive]
    return broken


@pytest.mark.parametrize("main", [loop, loop_with_evaluation])
def test_no_interleaving_breaks_a_promise(main: Actor) -> None:
    """Whatever the order of accesses, a loop that reaches a promised boundary stops there."""
    assert broken_promises(main, promising) == []


@pytest.mark.parametrize(("main", "thread"), [(loop_reads_first, promising), (loop, promising_once), (loop, promising_the_past)])
def test_planted_bugs_are_found(main: Actor, thread: Actor) -> None:
    """Swapped accesses, a missing second look and a promise of the past are all caught by the same exploration."""
    assert broken_promises(main, thread)


def test_real_threads_keep_their_promises() -> None:
    """The real gate under a switch interval of a microsecond: after each promise the loop stops at it, and never later."""
    gate = Gate()
    wrong: list[str] = []
    promised: list[int] = []
    stopped = threading.Event()
    go_on = threading.Event()
    ended = threading.Event()
    where = [0]

    def train() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            gate.next_check = step + 1
            if gate.at <= step:
                where[0] = step
                stopped.set()
                go_on.wait(5)
                go_on.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(100):
            promise = gate.promise()
            promised.append(promise)
            if not stopped.wait(5) or where[0] != promise:
                wrong.append(f"promised {promise}, stopped at {where[0]}")
                break
            stopped.clear()
            gate.aim()
            go_on.set()
    finally:
        ended.set()
        gate.aim()
        go_on.set()
        trainer.join(5)
        sys.setswitchinterval(interval)
    assert not wrong and len(set(promised)) == 100


def test_schedule_and_promise_do_not_overwrite_each_other() -> None:
    """The nearer of the two counts, and taking one away leaves the other."""
    gate = Gate(5)
    gate.schedule(8)
    assert gate.promise() == 5 and gate.at == 5
    gate.schedule(9)
    assert gate.at == 5
    gate.aim(7)
    assert gate.at == 7
    gate.aim()
    assert gate.at == 9
    gate.schedule()
    assert gate.at == NEVER
