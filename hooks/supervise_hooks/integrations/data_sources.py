"""Three ways to open an epoch of a user's loader at a given batch, chosen by `source_of`. Counting is done in `data`.

Indexed: the sampler is walked, nothing is loaded. Stateful: the loader knows its own position. Replayed: every batch up
to the position is made again and dropped.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from supervise_hooks.integrations.data_workers import SeededDataset, WorkerInit, born_shielded, shield
from supervise_hooks.integrations.sampling import EpochOrder, Opening, generators_of
from supervise_hooks.integrations.streams import Streams, StreamState, restore_shared, walk

log = logging.getLogger("supervise_hooks")


class Source(Protocol):
    """An epoch that can be opened anywhere."""

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """The batches of `epoch` after the first `skip`. `skip` > 0 only for the position last loaded."""

    def state(self) -> dict[str, Any]:
        """What `open` will need besides epoch and count: dicts, lists, numbers, strings and tensors."""

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave. Raises ValueError when it cannot be about this loader."""

    def exhausted_by(self, batches: int) -> bool:
        """True when an epoch ends after `batches` and opening it there can be left out."""


def source_of(loader: Any, reseed_workers: bool) -> Source:
    """The cheapest exact way to open `loader` in the middle. Raises TypeError for what cannot be iterated over again."""
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulSource(loader)
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and not isinstance(loader.dataset, IterableDataset):
        return IndexedSource(loader, reseed_workers)
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise TypeError(
            f"cannot keep the position in {type(loader).__name__}: it cannot be iterated over from the start again; "
            "pass the DataLoader itself, not iter(loader)"
        )
    return ReplayedSource(loader)


class IndexedSource:
    """A map-style DataLoader, rebuilt around an order of samples that can be taken up anywhere."""

    def __init__(self, loader: DataLoader[Any], reseed_workers: bool) -> None:
        self._theirs = loader
        self._streams = Streams(generators_of(loader))
        auto = loader.batch_sampler is not None
        self._order = EpochOrder(
            loader.batch_sampler if auto else loader.sampler, self._streams, numbered=reseed_workers and loader.num_workers > 0
        )
        self._base = _BaseSeed(loader, self._streams)
        self._loader = _rebuild(loader, self._order, auto)
        if not getattr(loader, "in_order", True):
            log.warning(
                "batches are handed out in order, not with in_order=False: otherwise a resume would repeat some and skip others"
            )

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        begun = self._order.begun if skip else None
        live = self._base.rewind(replaying=skip > 0)
        self._order.opening = Opening(epoch=epoch, replay=(begun, skip) if begun else None, live=live)
        with born_shielded(self._loader):
            return iter(self._loader)

    def state(self) -> dict[str, Any]:
        begun = self._order.begun
        return {
            "begun": {"shared": begun.shared, "own": begun.own} if begun else None,
            "base": self._base.drawn_from,
            "own": self._streams.capture_own(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._streams.restore_own(list(state["own"]))
        self._order.begun = _stream_state(state["begun"])
        self._base.forget(state["base"])
        self._loader = _rebuild(self._theirs, self._order, self._theirs.batch_sampler is not None)

    def exhausted_by(self, batches: int) -> bool:
        return _length(self._order.inner) == batches


class StatefulSource:
    """A loader with a position of its own (torchdata's StatefulDataLoader). Random draws inside its workers are its affair."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._streams = Streams(generators_of(loader))
        self._begun = False
        self._loaded: Any = None
        shield(loader)

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        with born_shielded(self._loader):
            iterator = self._iterator(skip)
        self._begun, self._loaded = True, None
        return iterator

    def _iterator(self, skip: int) -> Iterator[Any]:
        live = self._streams.capture() if self._loaded is not None else None
        if live is not None and not skip:
            # At an epoch's end torchdata 0.11 makes the finished iterator first, then the new one. This call makes the
            # first; only the second draws as in an uninterrupted run.
            self._loader.state_dict()
            restore_shared(live.shared)
        iterator: Iterator[Any] = iter(self._loader)
        if live is not None and skip:
            restore_shared(live.shared)
        return iterator

    def state(self) -> dict[str, Any]:
        if self._loaded is not None:
            return {"inner": self._loaded}
        # Asked before its first epoch, it would make an iterator and so draw from the shared streams.
        return {"inner": self._loader.state_dict() if self._begun else None}

    def load(self, state: dict[str, Any]) -> None:
        self._loaded = state["inner"]
        if self._loaded is not None:
            self._loader.load_state_dict(self._loaded)

    def exhausted_by(self, batches: int) -> bool:
        return False  # it must see its end by itself, or its sampler would not go on from there


class ReplayedSource:
    """Anything else that can be iterated over again: all batches up to the position are made and dropped.

    Exact as far as the data repeats itself from the same random streams. With persistent workers, what a dataset object
    remembers from earlier epochs is not repeated.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._streams = Streams(generators_of(loader))
        self._base = _BaseSeed(loader, self._streams)
        self._begun: StreamState | None = None
        shield(loader)

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        isolated = getattr(self._loader, "num_workers", 0) == 0
        if not skip or self._begun is None:
            self._begun = self._streams.capture()
            live = self._base.rewind(replaying=False)  # off the record when persistent workers are started again
            with born_shielded(self._loader):
                iterator = iter(self._loader)
            if live is not None:
                self._streams.restore(live)
            return walk(iterator, self._streams, None, isolated)
        log.warning("resuming in the middle of an epoch by making and dropping %d batches: this loader has no indices", skip)
        return walk(_Reopened(self._loader, self._base), self._streams, (self._begun, skip), isolated)

    def state(self) -> dict[str, Any]:
        begun = self._begun
        return {
            "begun": {"shared": begun.shared, "own": begun.own} if begun else None,
            "base": self._base.drawn_from,
            "own": self._streams.capture_own(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._streams.restore_own(list(state["own"]))
        self._begun = _stream_state(state["begun"])
        self._base.forget(state["base"])

    def exhausted_by(self, batches: int) -> bool:
        return False  # lengths of iterable datasets are estimates


class _BaseSeed:
    """The number from which torch seeds the workers of a new iterator, and the stream it is drawn from.

    An uninterrupted run draws it once an epoch, or once for all with persistent workers. A resumed run makes an iterator
    more, so its draw must give the same number and count for nothing.
    """

    def __init__(self, loader: Any, streams: Streams) -> None:
        self._generator: torch.Generator = getattr(loader, "generator", None) or torch.default_generator
        self._streams = streams
        self._persistent = bool(getattr(loader, "persistent_workers", False))
        self._made = False
        self.drawn_from: torch.Tensor | None = None

    def rewind(self, replaying: bool) -> StreamState | None:
        """To call just before iter(loader). Gives what to put back afterwards, or None when the draw counts."""
        again, self._made = self._persistent and self._made, True
        if again:
            return None  # the same workers go on, nothing is drawn
        if self.drawn_from is not None and (replaying or self._persistent):
            live = self._streams.capture()
            self._generator.set_state(self.drawn_from)
            return live
        self.drawn_from = self._generator.get_state()
        return None

    def forget(self, drawn_from: torch.Tensor | None) -> None:
        """Start over with what was saved; the next iterator is this process's first."""
        self._made, self.drawn_from = False, drawn_from


class _Reopened:
    def __init__(self, loader: Any, base: _BaseSeed) -> None:
        self._loader = loader
        self._base = base

    def __iter__(self) -> Iterator[Any]:
        self._base.rewind(replaying=True)  # `walk` puts the streams back
        with born_shielded(self._loader):
            return iter(self._loader)


def _rebuild(loader: DataLoader[Any], order: EpochOrder, auto: bool) -> DataLoader[Any]:
    """The user's loader over again with our order: torch refuses to exchange the sampler of an existing one."""
    workers = loader.num_workers > 0
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerInit(loader.worker_init_fn) if workers else loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    if getattr(loader, "pin_memory_device", ""):
        settings["pin_memory_device"] = loader.pin_memory_device
    dataset: Any = SeededDataset(loader.dataset) if order.numbered else loader.dataset
    if auto:
        return DataLoader(dataset, batch_sampler=order, **settings)
    return DataLoader(dataset, batch_size=None, sampler=order, **settings)


def _stream_state(saved: dict[str, Any] | None) -> StreamState | None:
    return None if saved is None else StreamState(shared=saved["shared"], own=list(saved["own"]))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None  # a sampler need not know its length
