"""What the wrapped loader promises besides exactness: numbers of the bare loader, epochs, refusals."""

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from supervise_hooks.integrations.data import ResumableLoader, wrap

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine with one core
]


class Numbers(Dataset[int]):
    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Told(Sampler[int]):
    """Writes down the epochs it is told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def wrapped(loader: Any) -> ResumableLoader:
    result = wrap(loader)
    assert result is not None
    return result


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_same_numbers_as_bare(workers: int, persistent: bool) -> None:
    """Wrapping changes neither the order of samples nor what the training draws from the global generator."""
    seen = []
    for outfit in (lambda loader: loader, wrapped):
        torch.manual_seed(3)
        made = DataLoader(Numbers(), 3, shuffle=True, num_workers=workers, persistent_workers=persistent and workers > 0)
        loader = outfit(made)
        seen.append([(batch.tolist(), torch.rand(()).item()) for _ in range(3) for batch in loader])
    assert seen[0] == seen[1]


def test_samplers_hear_the_epoch() -> None:
    """set_epoch comes before each epoch, with the right number after a resume, also to a sampler inside a batch sampler."""
    sampler = Told()
    loader = wrapped(DataLoader(Numbers(), 4, sampler=sampler))
    for _ in itertools.islice(loader.batches(), 5):
        pass
    assert sampler.epochs == [0, 1]
    inner = Told()
    again = wrapped(DataLoader(Numbers(), batch_sampler=torch.utils.data.BatchSampler(inner, 4, False)))
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    assert [batch.tolist() for batch in again] == [[8, 9]]
    assert inner.epochs[0] == 1


def test_ranks_share_an_epoch_out() -> None:
    """With DistributedSampler two ranks cover every sample once, in another order in the next epoch."""
    ranks = [wrapped(DataLoader(Numbers(), 2, sampler=DistributedSampler(Numbers(), 2, rank))) for rank in (0, 1)]
    epochs = [[[int(n) for batch in loader for n in batch] for loader in ranks] for _ in range(2)]
    assert all(sorted(sum(epoch, [])) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_skipping_loads_nothing() -> None:
    """A resume in mid-epoch does not load what was seen, and asks for nothing at all at an epoch's end."""
    loader = wrapped(DataLoader(Numbers(), 2))
    list(itertools.islice(loader, 3))
    data = Numbers()
    again = wrapped(DataLoader(data, 2))
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[6, 7], [8, 9]]
    assert data.loaded == [6, 7, 8, 9]
    list(itertools.islice(loader, 5))
    data.loaded.clear()
    again.load_state_dict({**loader.state_dict(), "batches": 5})
    assert list(again) == []
    assert data.loaded == []


def test_loop_left_early_counts_as_an_epoch() -> None:
    """After a break the next loop begins a whole new epoch, as with a bare loader."""
    loader = wrapped(DataLoader(Numbers(), 5))
    next(iter(loader))
    assert loader.position == (0, 1)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert loader.position == (2, 0)


def test_set_epoch_in_a_usual_loop(caplog: pytest.LogCaptureFixture) -> None:
    """set_epoch keeps the resumed position when it names the epoch in progress, and says so when it drops it."""
    loader = wrapped(DataLoader(Numbers(), 5))
    next(iter(loader))
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == [[5, 6, 7, 8, 9]]
    loader.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "supervise_hooks"):
        loader.set_epoch(4)
    assert "drops the resumed position" in caplog.text
    assert (len(list(loader)), loader.epoch) == (2, 5)


def test_older_iterator_counts_for_nothing() -> None:
    """Of two live iterators only the newer moves the position."""
    loader = wrapped(DataLoader(Numbers(), 5))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    assert [batch.tolist() for batch in older] == [[5, 6, 7, 8, 9]]
    assert loader.position == (1, 1)


def test_refusals() -> None:
    """An iterator, a number, an empty loader and a position of another kind of loader are refused in words."""
    assert wrap(None) is None
    for wrong in (iter(DataLoader(Numbers())), (number for number in range(3)), 7):
        with pytest.raises(TypeError, match="cannot keep the position"):
            wrap(wrong)
    with pytest.raises(ValueError, match="has none"):
        next(wrapped([]).batches())
    with pytest.raises(ValueError, match="saved by ReplayedSource"):
        wrapped(DataLoader(Numbers())).load_state_dict(wrapped([1]).state_dict())


def test_other_batch_size_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A position counted in batches of another size is not used in silence."""
    loader = wrapped(DataLoader(Numbers(), 5))
    next(iter(loader))
    with caplog.at_level(logging.WARNING, "supervise_hooks"):
        wrapped(DataLoader(Numbers(), 2)).load_state_dict(loader.state_dict())
    assert "repeat or skip" in caplog.text


def test_looks_like_the_loader() -> None:
    """Length and attributes are the wrapped loader's; wrapping twice is once."""
    loader = wrapped(DataLoader(Numbers(), 5))
    assert (len(loader), loader.batch_size, wrap(loader)) == (2, 5, loader)
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


@pytest.mark.process
@pytest.mark.parametrize("reseed", [True, False])
def test_reseeding_can_be_switched_off(reseed: bool) -> None:
    """Without it, workers go on with their own random streams and a batch depends on which worker made it."""

    class Noise(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([torch.rand(()).item(), random.random()])

    seen = []
    for workers in (1, 2):
        torch.manual_seed(3)
        loader = wrap(DataLoader(Noise(), 2, num_workers=workers), reseed_workers=reseed)
        seen.append([batch.tolist() for batch in loader or ()])
    assert (seen[0] == seen[1]) is reseed


@pytest.mark.process
def test_out_of_order_is_put_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """in_order=False would make a count of batches meaningless, so it is not taken over, aloud."""
    with caplog.at_level(logging.WARNING, "supervise_hooks"):
        loader = wrapped(DataLoader(Numbers(), 1, num_workers=2, in_order=False))
    assert "in_order" in caplog.text
    assert [int(batch) for batch in loader] == list(range(10))
