"""The order of an epoch's samples, so that it can be taken up in the middle without loading what was seen. No data here.

Shuffles are not stored: the streams they were drawn from are, as they stood when the epoch's sampler was started.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from supervise_hooks.integrations.data_workers import Numbered
from supervise_hooks.integrations.streams import Streams, StreamState, walk

# These draw from shared streams for their first item only, so their draws never alternate with the training's.
_DRAW_AT_FIRST = {RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler, range}


def samplers_of(loader: Any) -> list[Any]:
    """The loader itself, its samplers, and theirs."""
    found: dict[int, Any] = {id(loader): loader}
    for owner in (queue := [loader]):
        for name in ("sampler", "batch_sampler"):
            inner = getattr(owner, name, None)
            if inner is not None and id(inner) not in found:
                found[id(inner)] = inner
                queue.append(inner)
    return list(found.values())


def generators_of(loader: Any) -> list[torch.Generator]:
    """Every torch generator that the loader or one of its samplers keeps for itself."""
    owners = samplers_of(loader)
    return [kept for owner in owners for kept in getattr(owner, "__dict__", {}).values() if isinstance(kept, torch.Generator)]


class Opening(msgspec.Struct, frozen=True):
    """How the next walk over an epoch begins."""

    epoch: int
    replay: tuple[StreamState, int] | None = None
    live: StreamState | None = None
    """Put back first: what torch drew while making the iterator does not count."""


class EpochOrder:
    """Stands in for a (batch) sampler. `begun` is where the streams stood when the current epoch's order was begun."""

    def __init__(self, inner: Any, streams: Streams, numbered: bool) -> None:
        self.inner = inner
        self.opening = Opening(epoch=0)
        self.begun: StreamState | None = None
        self._streams = streams
        self.numbered = numbered

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        # Runs at the first next(), not at iter(): torch calls iter() twice for one epoch, and draws its base seed between.
        opening = self.opening
        if opening.live is not None:
            self._streams.restore(opening.live)
        self.begun = opening.replay[0] if opening.replay else self._streams.capture()
        order = walk(self.inner, self._streams, opening.replay, isolated=not _draws_at_first(self.inner))
        if not self.numbered:
            yield from order
            return
        salt = self.begun.digest()
        for number, index in enumerate(order, start=opening.replay[1] if opening.replay else 0):
            yield Numbered(index, _mix(salt, opening.epoch, number))


def _draws_at_first(sampler: Iterable[Any]) -> bool:
    if type(sampler) is BatchSampler:
        return _draws_at_first(sampler.sampler)
    return type(sampler) in _DRAW_AT_FIRST


def _mix(salt: int, epoch: int, number: int) -> int:
    """A seed for one batch: splitmix64 over the three, 63 bits."""
    mixed = salt
    for word in (epoch, number):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (word + 1)) & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        mixed ^= mixed >> 31
    return mixed >> 1
