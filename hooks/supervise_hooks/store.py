"""Where a round's keys live: torch's TCPStore for several ranks, a dictionary for one. Only transport; no decisions.

torch is imported when a TCPStore is opened. Measured with torch 2.13: a wait blocks every other call on the same client, so
the watcher has a client of its own, never the process group's; a wait that times out prints two lines, so what has a
deadline polls `check` instead.
"""

import importlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from supervise_hooks.agreement import Await, Count, Decide, Op, Put, ReadAll, Reply
from supervise_hooks.contract.errors import SuperviseError

_FOR_EVER = timedelta(days=3650)
_POLL_MIN_S = 0.001
_POLL_MAX_S = 0.05


class StoreLost(SuperviseError):
    """The shared store is gone: its host, the torchrun agent or rank 0, has died."""


class Store(Protocol):
    """A few atomic operations on keys that all ranks see."""

    def post(self, key: str, value: str) -> None:
        """Write `value` unless the key exists; from any thread. Raises StoreLost."""

    def watch(self, key: str) -> str:
        """Wait without limit, and without waking up, for a key; watcher thread only. Raises StoreLost."""

    def perform(self, op: Op, left_s: Callable[[], float]) -> Reply:
        """One operation of a round; `left_s` says how much time an Await has left. Watcher thread only. Raises StoreLost."""

    def close(self) -> None:
        """Let a waiting watcher go, where that is possible."""


class LocalStore:
    """The store of ranks in one process: of one, usually."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._closed = False

    def post(self, key: str, value: str) -> None:
        """See Store."""
        with self._changed:
            self._values.setdefault(key, value)
            self._changed.notify_all()

    def watch(self, key: str) -> str:
        """See Store."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed)
            if self._closed:
                raise StoreLost("the session is closed")
            return self._values[key]

    def perform(self, op: Op, left_s: Callable[[], float]) -> Reply:
        """See Store."""
        with self._changed:
            if isinstance(op, Put | Decide):
                self._changed.notify_all()
            match op:
                case Put(key, value):
                    self._values[key] = value
                    return None
                case Count(key):
                    self._values[key] = str(int(self._values.get(key, "0")) + 1)
                    return int(self._values[key])
                case ReadAll(keys):
                    return tuple(self._values[key] for key in keys)
                case Decide(key, value):
                    return self._values.setdefault(key, value)
                case Await(key):
                    self._changed.wait_for(lambda: key in self._values, max(0.0, left_s()))
                    return self._values.get(key)

    def close(self) -> None:
        """See Store."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class TcpStore:
    """Ranks of several processes, over the store that torchrun already runs."""

    def __init__(self, host: str, port: int, prefix: str, connect_s: float = 60.0) -> None:
        """Opens two clients. Raises StoreLost when nobody answers within `connect_s`."""
        self._where = f"{host}:{port}"
        self._prefix = prefix
        self._distributed = importlib.import_module("torch.distributed")
        self._watcher = self._connect(host, port, connect_s)
        self._poster = self._connect(host, port, connect_s)
        self._posting = threading.Lock()

    def _connect(self, host: str, port: int, connect_s: float) -> Any:
        def connect() -> Any:
            return self._distributed.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=connect_s)
            )

        return self._guarded(connect)

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # DistError and its children; a timeout of a call that has no deadline of ours
            raise StoreLost(
                f"cannot reach the store at {self._where} (MASTER_ADDR:MASTER_PORT): {str(error).splitlines()[0]}. "
                "If rank 0 hosts it, attach after init_process_group"
            ) from error

    def post(self, key: str, value: str) -> None:
        """See Store."""
        with self._posting:
            self._guarded(lambda: self._poster.compare_set(self._prefix + key, "", value))

    def watch(self, key: str) -> str:
        """See Store."""
        key = self._prefix + key
        self._guarded(lambda: self._watcher.wait([key], _FOR_EVER))
        return _text(self._guarded(lambda: self._watcher.get(key)))

    def perform(self, op: Op, left_s: Callable[[], float]) -> Reply:
        """See Store."""
        return self._guarded(lambda: self._perform(op, left_s))  # type: ignore[no-any-return]

    def close(self) -> None:
        """See Store. A wait in C++ cannot be ended; the watcher is a daemon thread and dies with the process."""

    def _perform(self, op: Op, left_s: Callable[[], float]) -> Reply:
        store, prefix = self._watcher, self._prefix
        match op:
            case Put(key, value):
                store.set(prefix + key, value)
                return None
            case Count(key):
                return int(store.add(prefix + key, 1))
            case ReadAll(keys):
                return tuple(_text(value) for value in store.multi_get([prefix + key for key in keys]))
            case Decide(key, value):
                return _text(store.compare_set(prefix + key, "", value))
            case Await(key):
                return self._await(prefix + key, left_s)

    def _await(self, key: str, left_s: Callable[[], float]) -> str | None:
        pause = _POLL_MIN_S
        while not self._watcher.check([key]):
            if left_s() <= 0:
                return None
            time.sleep(min(pause, max(0.0, left_s())))
            pause = min(2 * pause, _POLL_MAX_S)
        return _text(self._watcher.get(key))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def share(store: Store, key: str, value: str | None, left_s: float) -> str:
    """One value for all ranks at set-up: the rank that has it gives it, the others (None) wait. Raises StoreLost."""
    if value is not None:
        return str(store.perform(Decide(key, value), lambda: 0.0))
    deadline = time.monotonic() + left_s
    shared = store.perform(Await(key), lambda: deadline - time.monotonic())
    if shared is None:
        raise StoreLost(f"cannot begin together: no rank gave {key!r} within {left_s:.0f} s")
    return str(shared)
