"""The random streams a data loader draws from, and walking a source under them so that the walk can be repeated.

No data loader here: `sampling` walks samplers with it, `data` walks whole loaders that know no indices.
"""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch

_END = object()


class StreamState(msgspec.Struct, frozen=True):
    """Where every stream stood at one moment. `own` is in the order of `Streams.own`."""

    shared: dict[str, Any]
    own: list[torch.Tensor]

    def digest(self, *more: int) -> int:
        """63 bits that differ whenever a state or one of `more` does."""
        hasher = hashlib.blake2b(digest_size=8)
        for tensor in (self.shared["torch"], *self.own):
            hasher.update(tensor.cpu().numpy().tobytes())
        for number in more:
            hasher.update(number.to_bytes(8, "little"))
        return int.from_bytes(hasher.digest(), "little") >> 1


class Streams:
    """The process-wide streams (torch CPU, `random`, NumPy's legacy one) and the generators owned by one loader."""

    def __init__(self, own: Iterable[torch.Generator] = ()) -> None:
        distinct = {id(generator): generator for generator in own if generator is not torch.default_generator}
        self.own = list(distinct.values())

    def capture(self) -> StreamState:
        """Where all of them stand now."""
        return StreamState(shared=capture_shared(), own=self.capture_own())

    def restore(self, state: StreamState) -> None:
        """Put all of them back."""
        restore_shared(state.shared)
        self.restore_own(state.own)

    def capture_own(self) -> list[torch.Tensor]:
        """Where the loader's own generators stand now."""
        return [generator.get_state() for generator in self.own]

    def restore_own(self, states: list[torch.Tensor]) -> None:
        """Put the loader's own generators back. Raises ValueError when it has another number of them now."""
        if len(states) != len(self.own):
            raise ValueError(f"{len(states)} generators were saved, the loader and its samplers have {len(self.own)} now")
        for generator, state in zip(self.own, states, strict=True):
            generator.set_state(state)


def capture_shared() -> dict[str, Any]:
    """The process-wide streams as tensors and numbers, so that any checkpoint format can hold them."""
    version, words, gauss = random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        legacy = {"words": torch.from_numpy(keys.astype("int64")), "rest": [float(number) for number in rest]}
    return {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": legacy if numpy is not None else None,
    }


def restore_shared(state: dict[str, Any]) -> None:
    """Put back what `capture_shared` gave."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        position, has_gauss, cached = state["numpy"]["rest"]
        words = state["numpy"]["words"].numpy().astype("uint32")
        numpy.random.set_state(("MT19937", words, int(position), int(has_gauss), cached))


def walk(source: Iterable[Any], streams: Streams, replay: tuple[StreamState, int] | None, isolated: bool) -> Iterator[Any]:
    """Iterate over `source`; with `replay` as it went from that state, less the first so many items.

    A replay leaves the shared streams as they were: its draws have been made once, by the run that is being continued.
    `isolated`: everything drawn after the first item comes from a copy of the shared streams, because draws that
    alternate with the training's cannot be repeated without the training.
    """
    if replay is None:
        iterator = iter(source)
        first = next(iterator, _END)
        aside = capture_shared() if isolated else None
        if first is _END:
            return
        yield first
    else:
        live = capture_shared()
        streams.restore(replay[0])
        iterator = iter(source)
        for _ in range(replay[1]):
            next(iterator, _END)
        aside = capture_shared() if isolated else None
        restore_shared(live)
    while True:
        if aside is None:
            item = next(iterator, _END)
        else:
            live = capture_shared()
            restore_shared(aside)
            item = next(iterator, _END)
            aside = capture_shared()
            restore_shared(live)
        if item is _END:
            return
        yield item
