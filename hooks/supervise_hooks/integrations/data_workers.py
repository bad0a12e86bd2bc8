"""What runs inside data-loading workers: their signals and their random streams. Everything here can be pickled (spawn).

A worker must outlive a SIGTERM sent to the whole tree (bug cases C13, F9), must still obey its own rank, and must not
outlive that rank.
"""

import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import get_worker_info


def shield(loader: Any) -> None:
    """Make the workers of `loader`, from its next iterator on, ignore SIGTERM from anyone but their own rank.

    Loaders without workers are left alone; shielding twice is once.
    """
    if getattr(loader, "num_workers", 0) > 0 and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


@contextmanager
def born_shielded(loader: Any) -> Iterator[None]:
    """SIGTERM is blocked in this thread while the workers of `loader` are started, so that they are born with it blocked.

    Without it there is a moment between fork and `WorkerInit`, and a spawned worker has threads (OpenBLAS) from importing
    NumPy, born before `WorkerInit` could block anything. Its price: a rank that exits while workers are still starting waits for
    them to have started (the TERM stays pending until then).
    """
    if getattr(loader, "num_workers", 0) == 0:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        if _start_method(loader) != "fork":
            resource_tracker.ensure_running()  # unblocks SIGTERM when it starts its process (CPython 3.11): so not later
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_method(loader: Any) -> str | None:
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    method: str | None = context.get_start_method(allow_none=True)
    return method or "fork"  # the default on Linux before 3.14; asking for it would fix it for the user's program


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
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    rank = parent.pid if parent is not None and parent.pid is not None else os.getppid()  # under forkserver these are two
    theirs = _temporary()
    threading.Thread(target=_obey, args=(rank, theirs), name="supervise-worker-term", daemon=True).start()
    try:
        pidfd = os.pidfd_open(rank)
    except ProcessLookupError:
        _end(theirs)
    except OSError:
        return  # no pidfds in this kernel or sandbox: torch's own watchdog notices within 5 s (under forkserver: never)
    threading.Thread(target=_follow, args=(pidfd, theirs), name="supervise-worker-rank", daemon=True).start()


def _obey(rank: int, theirs: str | None) -> None:
    """End on the TERM by which torch and multiprocessing tidy up; unheard, the exit of a half-read loader hangs for ever."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    _end(theirs)


def _follow(pidfd: int, theirs: str | None) -> None:
    """End with the rank."""
    # Not PR_SET_PDEATHSIG: it fires when the thread that forked us ends, and means the wrong parent under forkserver.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    _end(theirs)


def _temporary() -> str | None:
    """The folder of multiprocessing's sockets, once tensors were sent from here; a forked worker may have its rank's."""
    configuration: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return configuration.get("tempdir")


def _end(theirs: str | None) -> NoReturn:
    """Exit from any thread, but without leaving in /tmp what a normal exit of a worker removes."""
    mine = _temporary()
    if mine is not None and mine != theirs:
        shutil.rmtree(mine, ignore_errors=True)
    os._exit(0)


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
