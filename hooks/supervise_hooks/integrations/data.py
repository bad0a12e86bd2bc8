"""The position in the data: which epoch, and how many of its batches were handed to the training.

How an epoch is opened in the middle is in `data_sources`; the order of samples in `sampling`; workers in `data_workers`.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from supervise_hooks.integrations.data_sources import source_of
from supervise_hooks.integrations.data_workers import shield
from supervise_hooks.integrations.sampling import samplers_of

__all__ = ["ResumableLoader", "shield", "wrap"]

log = logging.getLogger("supervise_hooks")


def wrap(loader: Any, reseed_workers: bool = True) -> "ResumableLoader | None":
    """The loader with a position that can be saved and restored; None for None.

    Raises TypeError for an iterator or anything else that has no beginning to come back to.
    """
    if loader is None or isinstance(loader, ResumableLoader):
        return loader
    return ResumableLoader(loader, reseed_workers)


class ResumableLoader:
    """Iterates like the loader it wraps, repeats and skips nothing after a resume, and leaves the training's randomness alone.

    Only batches handed out count; what workers prefetched does not. Each epoch begins with `set_epoch` on every sampler
    that has one. With workers and `reseed_workers`, each batch of a map-style dataset is made under its own seed, because
    the random state of a worker cannot be saved. Other attributes are those of the wrapped loader.
    """

    def __init__(self, loader: Any, reseed_workers: bool = True) -> None:
        self.loader = loader
        self._source = source_of(loader, reseed_workers)
        self._epoch = 0
        self._handed = 0
        self._resuming = False
        self._turn = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, or whose last batch has just been handed out; from 0."""
        return self._epoch

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and batches handed out in it."""
        return self._epoch, self._handed

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while unpickling or copying, before __init__
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after a resume, else a whole epoch. A loop left early counts as an epoch."""
        if self._resuming:
            self._resuming = False
        elif self._handed:
            self._epoch, self._handed = self._epoch + 1, 0
        self._turn = turn = self._turn + 1
        self._tell_epoch()
        if not (self._handed and self._source.exhausted_by(self._handed)):
            for batch in self._source.open(self._epoch, self._handed):
                if turn == self._turn:
                    self._handed += 1
                yield batch
        if turn == self._turn:  # an older iterator, still alive beside a newer one, counts for nothing
            self._epoch, self._handed = self._epoch + 1, 0

    def batches(self) -> Iterator[Any]:
        """Batches without end, epoch after epoch. Raises ValueError when an epoch has none at all."""
        while True:
            resumed, any_batch = self._resuming, False
            for batch in self:
                any_batch = True
                yield batch
            if not any_batch and not resumed:
                raise ValueError(f"cannot draw batches: epoch {self._epoch - 1} of the loader has none")

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`; a no-op for the epoch that a resume is in, so that a usual loop may call it."""
        if self._resuming and epoch == self._epoch:
            return
        if self._resuming and self._handed:
            log.warning("set_epoch(%d) drops the resumed position: epoch %d, batch %d", epoch, self._epoch, self._handed)
        self._epoch, self._handed, self._resuming = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position: dicts, lists, numbers, strings and tensors."""
        return {
            "kind": type(self._source).__name__,
            "epoch": self._epoch,
            "batches": self._handed,
            "batch_size": getattr(self.loader, "batch_size", None),
            "source": self._source.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; the next iterator goes on from there.

        Raises ValueError when it was saved from another kind of loader. Another batch size is only warned of.
        """
        kind = type(self._source).__name__
        if state["kind"] != kind:
            raise ValueError(
                f"cannot restore the position in the data: it was saved by {state['kind']}, this loader needs {kind}"
            )
        batch_size = getattr(self.loader, "batch_size", None)
        if state["batch_size"] != batch_size and state["batches"]:
            log.warning(
                "the position is %d batches of %s; batches of %s will now repeat or skip samples until the epoch ends",
                *(state["batches"], state["batch_size"], batch_size),
            )
        self._source.load(state["source"])
        self._epoch, self._handed, self._resuming = int(state["epoch"]), int(state["batches"]), True

    def _tell_epoch(self) -> None:
        dataset = getattr(self.loader, "dataset", None)
        for owner in [*samplers_of(self.loader), *([dataset] if isinstance(dataset, IterableDataset) else [])]:
            tell = getattr(owner, "set_epoch", None)
            if callable(tell):
                tell(self._epoch)
