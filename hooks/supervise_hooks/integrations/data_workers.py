"""What runs inside data-loading workers: their signals and their random streams. Everything here can be pickled (spawn).

A worker must outlive a SIGTERM sent to the whole tree (bug cases C13, F9), must still obey its own rank, and must not
outlive that rank.
"""

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

_PR_SET_PDEATHSIG = 1
# SIGTERM cannot carry the news of the parent's death: it would look like the rank's own terminate() when only the thread
# that forked us has ended. A real-time signal has no other user here.
_PARENT_ENDED = signal.SIGRTMAX - 3


def shield(loader: Any) -> None:
    """Make the workers of `loader`, from its next iterator on, ignore SIGTERM from anyone but their own rank.

    Loaders without workers are left alone; shielding twice is once.
    """
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


class WorkerInit:
    """A `worker_init_fn` that shields the worker, shows the user's own dataset to the user's own function and calls it."""

    def __init__(self, theirs: Callable[[int], Any] | None) -> None:
        self.theirs = theirs

    def __call__(self, worker: int) -> None:
        _listen()
        info = get_worker_info()
        dataset = getattr(info, "dataset", None)
        if isinstance(dataset, SeededDataset):
            object.__setattr__(info, "dataset", dataset.dataset)  # it is frozen (torch 2.13)
        if self.theirs is not None:
            self.theirs(worker)


def _listen() -> None:
    awaited = {signal.SIGTERM, _PARENT_ENDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    parent = multiprocessing.parent_process()
    above = os.getppid()
    rank = parent.pid if parent is not None and parent.pid is not None else above  # under forkserver these are two processes
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _PARENT_ENDED)
    if os.getppid() != above:  # it died before the kernel was asked to tell us
        os._exit(0)
    threading.Thread(target=_obey, args=(awaited, rank, above), name="supervise-worker-signals", daemon=True).start()


def _obey(awaited: set[int], rank: int, above: int) -> None:
    while True:
        info = signal.sigwaitinfo(awaited)
        if info.si_signo == signal.SIGTERM and info.si_pid == rank:
            os._exit(0)  # torch or multiprocessing tidying up; without this the exit of a half-read loader hangs for ever
        if info.si_signo == _PARENT_ENDED and os.getppid() != above:
            os._exit(0)  # torch's own watchdog would notice within 5 s, with the tree not empty until then


class Numbered(NamedTuple):
    """What the sampler sends to a worker: indices (or one index) and the seed that this batch is made under."""

    index: Any
    seed: int


class SeededDataset:
    """A map-style dataset whose every batch is made under its own seed, so that it is the same whichever worker makes it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, numbered: Numbered) -> Any:
        _seed(numbered.seed)
        return self.dataset[numbered.index]

    def __getitems__(self, numbered: Numbered) -> Any:
        _seed(numbered.seed)
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(numbered.index)
        return [self.dataset[index] for index in numbered.index]


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])
