"""Rounds of several ranks in one process: common steps, a missing peer, a lost store, and saves by the clock and by epoch."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from supervise_hooks.agreement import Op, Purpose, Reply
from supervise_hooks.attaching import Wishes, open_session
from supervise_hooks.contract.messages import Committed, Saved
from supervise_hooks.gate import Gate
from supervise_hooks.rounds import Callbacks, Member, Rounds
from supervise_hooks.store import LocalStore, StoreLost
from supervise_hooks.testing import CountingState, eventually


class Peer:
    """One rank with a loop of its own, on a shared store."""

    def __init__(self, rank: int, world_size: int, store: Any, saved: list[tuple[int, int]]) -> None:
        self.gate = Gate(0)
        self.sent: list[msgspec.Struct] = []
        self.abandoned: list[tuple[Purpose, str]] = []
        self.rank = rank
        self.saved = saved
        self.step = 0
        callbacks = Callbacks(self.sent.append, lambda active: None, lambda purpose, why: self.abandoned.append((purpose, why)))
        self.rounds = Rounds(Member(rank, world_size), self.gate, store, callbacks)
        self.rounds.start()

    def train(self, until: Callable[[], bool]) -> None:
        """Steps without a pause, until told."""
        while not until():
            self.step += 1
            self.gate.next_check = self.step + 1
            if self.gate.at <= self.step:
                active = self.rounds.due(self.step)
                if active is not None:
                    self.saved.append((self.rank, self.step))
                    self.rounds.finish(active, Saved(flush_id=0, step=self.step, path="p", size=0, seconds=0.0))


def test_uncoupled_ranks_save_one_common_step_each_time() -> None:
    """Three loops at their own speeds, flushed six times by changing ranks: each time all three save the same step."""
    store, saved = LocalStore(), list[tuple[int, int]]()
    peers = [Peer(rank, 3, store, saved) for rank in range(3)]
    done = threading.Event()
    threads = [threading.Thread(target=peer.train, args=(done.is_set,)) for peer in peers]
    for thread in threads:
        thread.start()
    try:
        for turn in range(6):
            peers[turn % 3].rounds.ask("continue", "test", 20.0, flush_id=turn + 1)
            eventually(lambda turn=turn: len(saved) == 3 * (turn + 1), f"round {turn}")  # type: ignore[misc]
            assert len({step for _, step in saved[-3:]}) == 1
            assert {rank for rank, _ in saved[-3:]} == {0, 1, 2}
    finally:
        done.set()
        for thread in threads:
            thread.join(10)
        store.close()
    assert not any(peer.abandoned for peer in peers)


def test_a_missing_peer_ends_in_an_abort_in_time() -> None:
    """When one of two ranks never promises, the round is given up at its deadline, said with a reason, and the loop goes on."""
    store, saved = LocalStore(), list[tuple[int, int]]()
    peer = Peer(0, 2, store, saved)
    peer.rounds.ask("continue", "test", 0.2, flush_id=5)
    peer.train(lambda: bool(peer.abandoned) and peer.step > 100)
    store.close()
    assert not saved
    (committed,) = peer.sent
    assert isinstance(committed, Committed) and (committed.flush_id, committed.step) == (5, None)
    assert "in time" in committed.why


def test_after_an_abort_the_next_round_works() -> None:
    """A round that was given up does not stand in the way of the next one."""
    store, saved = LocalStore(), list[tuple[int, int]]()
    first = Peer(0, 2, store, saved)
    first.rounds.ask("continue", "test", 0.05, flush_id=1)
    eventually(lambda: first.abandoned, "the abort")
    second = Peer(1, 2, store, saved)  # late: finds the aborted round, then the new one
    done = threading.Event()
    threads = [threading.Thread(target=peer.train, args=(done.is_set,)) for peer in (first, second)]
    for thread in threads:
        thread.start()
    try:
        first.rounds.ask("continue", "test", 20.0, flush_id=2)
        eventually(lambda: len(saved) == 2, "both saves")
    finally:
        done.set()
        for thread in threads:
            thread.join(10)
        store.close()
    assert saved[0][1] == saved[1][1]


class BreakingStore(LocalStore):
    """A store whose host dies at the first operation of a round."""

    def perform(self, op: Op, left_s: Callable[[], float]) -> Reply:
        """See Store."""
        raise StoreLost("connection reset by peer")


def test_a_lost_store_is_said_and_the_loop_goes_on() -> None:
    """With the store gone, a flush is answered with no step and the reason, and so is every later one."""
    store, saved = BreakingStore(), list[tuple[int, int]]()
    peer = Peer(0, 2, store, saved)
    peer.rounds.ask("leave", "test", 20.0, flush_id=1)
    peer.train(lambda: bool(peer.abandoned) and peer.step > 100)
    peer.rounds.ask("leave", "test", 20.0, flush_id=2)
    store.close()
    assert [(m.flush_id, m.step, m.why) for m in peer.sent if isinstance(m, Committed)] == [
        (1, None, "connection reset by peer"),
        (2, None, "connection reset by peer"),
    ]
    assert not saved


def test_an_order_to_leave_follows_a_flush_to_go_on() -> None:
    """An order to leave that comes while a lesser round is open gets a round of its own afterwards."""
    store, saved = LocalStore(), list[tuple[int, int]]()
    peer = Peer(0, 1, store, saved)
    peer.rounds.ask("continue", "test", 20.0, flush_id=1)
    eventually(lambda: any(isinstance(m, Committed) for m in peer.sent), "the first commit")
    peer.rounds.ask("leave", "test", 20.0, flush_id=2)
    peer.train(lambda: len(saved) == 2)
    store.close()
    answers = [m.flush_id for m in peer.sent if isinstance(m, Saved)]
    assert answers == [1, 2]


# --- by the clock, by epoch


def test_saves_by_the_clock(tmp_path: Path) -> None:
    """`every_s` saves again and again without the loop ever looking at a clock."""
    state = CountingState()
    run = open_session(state, Wishes(checkpoints=tmp_path, every_s=0.05, save_at_end=False), {})
    for _ in run.steps(10**9):
        state.train()
        if len(state.saves) == 3:
            run.finish()
            break
    run.close()
    assert [context.reason for context in state.saves] == ["periodic"] * 3


class Loader:
    """What a session needs of a loader: epochs of four batches, and a position."""

    def __init__(self, epoch: int = 0, handed: int = 0) -> None:
        self.epoch = epoch
        self.handed = handed

    def __iter__(self) -> Iterator[int]:
        while self.handed < 4:
            self.handed += 1
            yield self.handed
        self.epoch, self.handed = self.epoch + 1, 0


def test_epochs_count_steps_by_advance(tmp_path: Path) -> None:
    """Two epochs of four batches are eight steps; an evaluation after an epoch counts none."""
    state = CountingState()
    run = open_session(state, Wishes(checkpoints=tmp_path), {}, Loader())
    epochs = []
    for epoch in run.epochs(2):
        for _ in run.batches():
            state.train()
            run.advance()
        with run.evaluating():
            state.draw()
        epochs.append(epoch)
    run.close()
    assert (epochs, run.step, state.count, state.saves[-1].epoch) == ([0, 1], 8, 8, 2)


def test_an_interrupted_epoch_end_is_run_again_without_batches(tmp_path: Path) -> None:
    """Saved inside the evaluation after epoch 0: on resume epoch 0 is offered again, empty, so that its evaluation is redone."""
    state = CountingState()
    run = open_session(state, Wishes(checkpoints=tmp_path, save_at_end=False), {}, Loader())
    for _ in run.epochs(2):
        for _ in run.batches():
            state.train()
            run.advance()
        with run.evaluating():
            run.save()
        break
    run.close()
    again = CountingState()
    run = open_session(again, Wishes(checkpoints=tmp_path, resume="auto"), {}, Loader(1, 0))
    offered: list[tuple[int, int]] = []
    for epoch in run.epochs(2):
        assert run.evaluation_interrupted == (epoch == 0)
        count = 0
        for _ in run.batches():
            again.train()
            run.advance()
            count += 1
        offered.append((epoch, count))
    run.close()
    assert offered == [(0, 0), (1, 4)] and again.count == 8
