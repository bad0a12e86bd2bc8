"""The agreement over every interleaving, death and time-out of two and three ranks, with planted bugs, and at scale."""

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest

from supervise_hooks.agreement import ABORT, Await, Count, Decide, Op, Participant, Put, ReadAll, Reply, commit_key, satisfies

Values = tuple[tuple[str, str], ...]


class Machine(NamedTuple):
    """What is explored: the product's machine, or one with a bug in it."""

    promise: Callable[[int], int] = lambda next_check: next_check
    decide: Callable[[Participant], Participant] = lambda participant: participant
    perform: Callable[[dict[str, str], Op], Reply] = lambda values, op: perform(values, op)


class Rank(NamedTuple):
    """One rank in the model. Its loop stands at boundary `at`, and has checked its gate there."""

    at: int
    gate: int
    """Where the loop stops; a large number: nowhere."""
    participant: Participant | None
    alive: bool
    """Whether the watcher thread still runs. The loop outlives it."""
    saved: int
    held: bool = False
    """Whether the check at `at` stopped the loop. A gate lowered after the check is seen only at the next boundary."""

    def aimed(self, gate: int) -> "Rank":
        """After a new gate: a held loop looks again, a running one does not."""
        return self._replace(gate=gate, held=self.held and gate <= self.at)


class World(NamedTuple):
    """One configuration."""

    ranks: tuple[Rank, ...]
    values: Values


FAR = 1 << 20
END = 3
"""Boundaries explored."""


def perform(values: dict[str, str], op: Op) -> Reply:
    """The store: each operation is atomic."""
    match op:
        case Put(key, value):
            values[key] = value
            return None
        case Count(key):
            values[key] = str(int(values.get(key, "0")) + 1)
            return int(values[key])
        case ReadAll(keys):
            return tuple(values[key] for key in keys)
        case Decide(key, value):
            return values.setdefault(key, value)
        case Await(key):
            return values.get(key)


def may_step(world: World, index: int, coupled: bool) -> bool:
    """Whether a loop can complete its next step: not stopped, and, when coupled, all peers have begun it."""
    rank = world.ranks[index]
    if rank.at >= END or rank.held:
        return False
    if not coupled:
        return True
    return all(peer.at > rank.at or (peer.at == rank.at and not peer.held) for peer in world.ranks)


def loop_moves(world: World, index: int, coupled: bool) -> list[Rank]:
    """The loop: complete a step and check, or save where it was told to."""
    rank = world.ranks[index]
    moves = []
    if may_step(world, index, coupled):
        moves.append(rank._replace(at=rank.at + 1, held=rank.gate <= rank.at + 1))
    done = rank.participant is not None and rank.participant.stage == "done"
    if done and rank.participant is not None and rank.participant.outcome is not None and rank.saved < 0:
        if rank.held and rank.at >= rank.participant.outcome:
            moves.append(rank._replace(saved=rank.at).aimed(FAR))
    return moves


def thread_moves(world: World, index: int, machine: Machine, may_die: bool) -> list[tuple[Rank, Values]]:
    """The watcher: promise, one operation on the store, time-out, or death."""
    rank = world.ranks[index]
    if not rank.alive or (rank.participant is not None and rank.participant.stage == "done"):
        return []
    moves: list[tuple[Rank, Values]] = []
    if may_die:
        moves.append((rank._replace(alive=False), world.values))
    participant = rank.participant
    if participant is None:
        # Atomic here: that the loop is certain to stop at its next check is what the gate's own exploration shows.
        promise = machine.promise(rank.at + 1)
        fresh = Participant(1, index, len(world.ranks), promise)
        moves.append((rank._replace(participant=fresh).aimed(promise), world.values))
        return moves
    op = participant.op()
    assert op is not None
    if isinstance(op, Await) and op.key not in dict(world.values):
        moves.append((rank._replace(participant=participant.heard(None)), world.values))
        return moves
    values = dict(world.values)
    heard = machine.decide(participant.heard(machine.perform(values, op)))
    gate = rank.gate
    if heard.stage == "done":
        gate = FAR if heard.outcome is None else heard.outcome
    moves.append((rank._replace(participant=heard).aimed(gate), tuple(sorted(values.items()))))
    return moves


def moves_of(world: World, machine: Machine, coupled: bool, deaths: int) -> list[World]:
    """Every configuration one move away."""
    dead = sum(not rank.alive for rank in world.ranks)
    following = []
    for index in range(len(world.ranks)):
        for moved in loop_moves(world, index, coupled):
            following.append(world._replace(ranks=_with(world.ranks, index, moved)))
        for rank, values in thread_moves(world, index, machine, dead < deaths):
            following.append(World(_with(world.ranks, index, rank), values))
    return following


def _with(ranks: tuple[Rank, ...], index: int, rank: Rank) -> tuple[Rank, ...]:
    return (*ranks[:index], rank, *ranks[index + 1 :])


def violations(world: World, stuck: bool) -> list[str]:
    """What must never be."""
    found = []
    saved = {rank.saved for rank in world.ranks if rank.saved >= 0}
    if len(saved) > 1:
        found.append(f"saved at different steps: {sorted(saved)}")
    outcomes = {
        rank.participant.outcome for rank in world.ranks if rank.participant is not None and rank.participant.stage == "done"
    }
    if len(outcomes) > 1:
        found.append(f"different outcomes: {outcomes}")
    for index, rank in enumerate(world.ranks):
        outcome = rank.participant.outcome if rank.participant is not None and rank.participant.stage == "done" else None
        if outcome is not None and rank.saved < 0 and rank.at > outcome:
            found.append(f"rank {index} is past the common step {outcome}: at {rank.at}")
        if stuck and rank.alive and (rank.participant is None or rank.participant.stage != "done"):
            found.append(f"rank {index} waits for ever for the round")
        if stuck and outcome is not None and outcome <= END and rank.saved < 0 and all(peer.alive for peer in world.ranks):
            found.append(f"rank {index} never reaches the common step {outcome}")
    return found


def explore(ranks: int, coupled: bool, deaths: int, machine: Machine = Machine()) -> tuple[int, list[str]]:
    """(configurations seen, violations) of every order of moves; stops at the first violation."""
    begin = World(tuple(Rank(0, FAR, None, True, -1) for _ in range(ranks)), ())
    seen = {begin}
    front = [begin]
    while front:
        world = front.pop()
        following = moves_of(world, machine, coupled, deaths)
        found = violations(world, stuck=not following)
        if found:
            return len(seen), found
        for other in following:
            if other not in seen:
                seen.add(other)
                front.append(other)
    return len(seen), []


@pytest.mark.parametrize(
    ("ranks", "coupled", "deaths"), [(2, True, 0), (2, False, 0), (2, True, 2), (2, False, 2), (3, True, 0), (3, True, 1)]
)
def test_every_interleaving_keeps_the_promises(ranks: int, coupled: bool, deaths: int) -> None:
    """No order of steps, operations, deaths and time-outs lets ranks save apart, be past their step, or wait for ever."""
    count, found = explore(ranks, coupled, deaths)
    assert not found
    assert count > 100  # it did explore


def _commit_the_least(participant: Participant) -> Participant:
    if participant.stage != "deciding":
        return participant
    return msgspec.structs.replace(participant, proposal=min(participant.proposal, participant.promise))


def _overwrite_with_abort(values: dict[str, str], op: Op) -> Reply:
    if isinstance(op, Decide) and op.value == ABORT:
        values[op.key] = ABORT
        return ABORT
    return perform(values, op)


@pytest.mark.parametrize(
    "machine",
    [
        Machine(promise=lambda next_check: next_check - 1),
        Machine(decide=_commit_the_least),
        Machine(perform=_overwrite_with_abort),
    ],
    ids=["promise of the past", "commit the least", "abort without compare-and-set"],
)
def test_planted_bugs_are_found(machine: Machine) -> None:
    """The same exploration catches each of three plausible mistakes."""
    assert any(explore(2, coupled, 0, machine)[1] for coupled in (True, False))


def test_two_thousand_ranks_agree() -> None:
    """At 2,000 ranks in random order everybody ends with the largest promise, after at most five operations each."""
    chance = random.Random(7)
    promises = [chance.randrange(1000, 1004) for _ in range(2000)]
    ranks = [Participant(1, index, 2000, promise) for index, promise in enumerate(promises)]
    values: dict[str, str] = {}
    operations = [0] * 2000
    waiting = list(range(2000))
    while waiting:
        index = chance.choice(waiting)
        op = ranks[index].op()
        assert op is not None
        if isinstance(op, Await) and op.key not in values:
            waiting.remove(index)  # asleep until the commit
            continue
        operations[index] += 1
        ranks[index] = ranks[index].heard(perform(values, op))
        if ranks[index].stage == "done":
            waiting.remove(index)
        if values.get(commit_key(1)) and all(ranks[other].stage in ("waiting", "done") for other in waiting):
            waiting = [other for other in range(2000) if ranks[other].stage != "done"]
    assert {rank.outcome for rank in ranks} == {max(promises)}
    assert max(operations) <= 4


def test_out_of_time_everybody_obeys_the_first_decision() -> None:
    """A rank that gives up after the commit obeys the commit; one that gives up before makes all give up."""
    late = Participant(1, 0, 2, 5, stage="waiting").heard(None)
    values = {commit_key(1): "9"}
    op = late.op()
    assert op == Decide(commit_key(1), ABORT)
    assert late.heard(perform(values, op)).outcome == 9
    empty: dict[str, str] = {}
    assert late.heard(perform(empty, op)).outcome is None
    assert empty == {commit_key(1): ABORT}


def test_a_round_to_leave_answers_every_wish_but_not_the_reverse() -> None:
    """A flush to go on does not satisfy an order to leave."""
    assert satisfies("leave", "continue") and satisfies("periodic", "continue")
    assert not satisfies("continue", "leave") and not satisfies("periodic", "leave")
