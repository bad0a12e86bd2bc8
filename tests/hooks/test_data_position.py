"""A training that is interrupted anywhere sees the samples and the random draws of one that is not."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from supervise_hooks.integrations.data import ResumableLoader, wrap
from supervise_hooks.integrations.streams import capture_shared, restore_shared

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated:UserWarning"),  # torchdata 0.11 calls it
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # on a machine with one core
]

SAMPLES = 22
EPOCHS = 3


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index


class Augmented(Plain):
    """Each sample carries draws of all three libraries."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), float(np.random.rand()), torch.rand(()).item()], dtype=torch.float64)


class AugmentedAtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        together = torch.rand(()).item()
        return [self[index] + together for index in indices]


class Lazy(Sampler[int]):
    """Draws from the shared streams for every sample, as home-made samplers do."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (int(torch.randint(SAMPLES, ()).item()) + random.randrange(SAMPLES) + int(np.random.randint(9))) % SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id if info else 0, SAMPLES, info.num_workers if info else 1):
            yield torch.tensor([index, torch.rand(()).item(), random.random()], dtype=torch.float64)


class SeedOfWorker(IterableDataset[Any]):
    """Depends on torch's seed of the worker and nothing else that is random."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for index in range(info.id, SAMPLES, info.num_workers):
            yield torch.tensor([index, info.seed])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distributed(rank: int, workers: int) -> DataLoader[Any]:
    data = Augmented()
    return DataLoader(data, 3, sampler=DistributedSampler(data, 2, rank, seed=5), num_workers=workers)


def draws_with(workers: int, **more: Any) -> DataLoader[Any]:
    generator = seeded(3)
    sampler = RandomSampler(Augmented(), replacement=True, num_samples=70, generator=generator)
    return DataLoader(Augmented(), 4, sampler=sampler, generator=generator, num_workers=workers, **more)


def stateful(workers: int, **more: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Plain() if workers else Augmented()  # what StatefulDataLoader's workers draw is not in its state
    return StatefulDataLoader(data, 4, num_workers=workers, **more)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Augmented(), 4),
    "shuffled": lambda: DataLoader(Augmented(), 4, shuffle=True),
    "shuffled, whole batches": lambda: DataLoader(Augmented(), 4, shuffle=True, drop_last=True),
    "single samples": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True),
    "samples fetched together": lambda: DataLoader(AugmentedAtOnce(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=seeded(3)),
    "own generator, drawn from all along": lambda: draws_with(0),
    "rank 0 of 2": lambda: distributed(0, 0),
    "rank 1 of 2": lambda: distributed(1, 0),
    "lazy sampler": lambda: DataLoader(Augmented(), 4, sampler=Lazy()),
    "stream": lambda: DataLoader(Stream(), 4),
    "stateful": lambda: stateful(0, shuffle=True),
    "stateful, in order": lambda: stateful(0),
    "list": lambda: [torch.tensor([number]) for number in range(6)],
}
WORKERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Augmented(), 4, num_workers=2),
    "shuffled": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=2),
    "single samples": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True, num_workers=2),
    "samples fetched together": lambda: DataLoader(AugmentedAtOnce(), 4, shuffle=True, num_workers=2),
    "own generator, persistent": lambda: draws_with(2, persistent_workers=True),
    "persistent": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "rank 1 of 2": lambda: distributed(1, 2),
    "lazy sampler": lambda: DataLoader(Augmented(), 4, sampler=Lazy(), num_workers=2),
    "stream": lambda: DataLoader(Stream(), 4, num_workers=2),
    "stream, persistent": lambda: DataLoader(SeedOfWorker(), 4, num_workers=2, persistent_workers=True),
    "stateful": lambda: stateful(2, shuffle=True),
    "stateful, in order": lambda: stateful(2),
    "stateful, persistent": lambda: stateful(2, shuffle=True, persistent_workers=True),
}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def key(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def train(loader: ResumableLoader, steps: int, by_epoch: bool, epoch: int) -> list[Any]:
    """Every batch with the dropout mask drawn after it; stops after so many steps, by epochs once an epoch's end is seen."""
    seen: list[Any] = []
    while len(seen) < steps:
        iterator = iter(loader) if by_epoch else loader.batches()
        for batch in itertools.islice(iterator, steps - len(seen)):
            seen.append((loader.position, key(batch), torch.rand(2).tolist(), random.random(), float(np.random.rand())))
    if by_epoch and loader.position[1] == epoch:
        assert next(iterator, None) is None
        assert loader.position[1] == 0
    return seen


def resumed(make: Callable[[], Any], saved: Any, rng: Any, restore_first: bool) -> ResumableLoader:
    seed_all(999)  # a new process: its streams stand anywhere
    loader = wrap(make())
    assert loader is not None
    if restore_first:
        restore_shared(rng)
    loader.load_state_dict(saved)
    if not restore_first:
        restore_shared(rng)
    return loader


def check(make: Callable[[], Any], cuts: tuple[int, ...], by_epoch: bool) -> None:
    epoch = length(make)
    steps = EPOCHS * epoch
    seed_all(7)
    whole_loader = wrap(make())
    assert whole_loader is not None
    whole = train(whole_loader, steps, by_epoch, epoch)
    assert len(whole) == steps
    seed_all(7)
    loader = wrap(make())
    assert loader is not None
    pieces: list[Any] = []
    for number, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(whole)))):
        pieces += train(loader, end - begin, by_epoch, epoch)
        saved, rng = loader.state_dict(), capture_shared()
        assert loader.state_dict()["batches"] == saved["batches"]  # asking changes nothing
        loader = resumed(make, saved, rng, restore_first=number % 2 == 0)
        assert loader.state_dict()["epoch"] == saved["epoch"]
    assert pieces == whole
    assert len({str(batch) for _, batch, *_ in whole}) > 1


def length(make: Callable[[], Any]) -> int:
    return sum(1 for _ in make())


def boundaries(make: Callable[[], Any]) -> tuple[int, ...]:
    epoch = length(make)
    return (1, epoch - 1, epoch, epoch + 1, 2 * epoch, 2 * epoch + epoch // 2)


@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("name", LOADERS)
def test_interrupted_anywhere_without_workers(name: str, by_epoch: bool) -> None:
    """Cut before, at and after epoch boundaries and in mid-epoch, batches and every random draw are those of one run."""
    check(LOADERS[name], boundaries(LOADERS[name]), by_epoch)


@pytest.mark.process
@pytest.mark.parametrize("by_epoch", [True, False])
@pytest.mark.parametrize("name", WORKERS)
def test_interrupted_anywhere_with_workers(name: str, by_epoch: bool) -> None:
    """The same with two workers: prefetched batches do not count, random augmentation inside workers is repeated."""
    epoch = length(WORKERS[name])
    check(WORKERS[name], (2, epoch, epoch + 3), by_epoch)


@pytest.mark.process
def test_no_two_epochs_are_augmented_alike() -> None:
    """Augmentation differs between epochs also where nothing draws from the training's own streams in between."""
    torch.manual_seed(7)
    loader = wrap(DataLoader(Augmented(), 4, num_workers=2, persistent_workers=True))
    assert loader is not None
    first, second = ([key(batch) for batch in loader] for _ in range(2))
    assert first != second
