"""For tests of training scripts: a fake supervisor on a real socket, and a training state without torch.

with FakeSupervisor(tmp_path) as supervisor:
    process = subprocess.Popen([sys.executable, "train.py"], env=supervisor.env())
    supervisor.ask_flush()
    saved = supervisor.wait_for(messages.Saved)
    supervisor.leave()
"""

import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from supervise_hooks.contract import digests, durable, env, layout, messages
from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.contract.manifest import FileEntry, Receipt, write_receipt
from supervise_hooks.contract.messages import Purpose
from supervise_hooks.state import Loaded, SaveContext

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class FakeSupervisor:
    """Speaks the supervisor's side of the real protocol; records what ranks say. A context manager."""

    def __init__(self, checkpoints: str | os.PathLike[str], run_id: str = "test-run", attempt: int = 1) -> None:
        self.checkpoints = Path(checkpoints)
        self.run_id = run_id
        self.attempt = attempt
        self.received: list[tuple[int, messages.FromRank]] = []
        """(rank, message) in order of arrival; the rank is -1 before its Hello."""
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, int] = {}
        self._gone: set[int] = set()
        self._flush_id = 0
        self._folder = tempfile.mkdtemp(prefix="supervise-test-")  # short: socket paths end at 108 bytes
        self.path = os.path.join(self._folder, "s")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.die()
        for thread in self._threads:
            thread.join(5.0)
        shutil.rmtree(self._folder)

    def env(self, **more: str) -> dict[str, str]:
        """Environment for a script to be supervised by this object: the current one, ours, and `more`."""
        ours = {
            env.SOCKET: self.path,
            env.RUN_ID: self.run_id,
            env.ATTEMPT: str(self.attempt),
            env.RESUME: "",
            env.CHECKPOINTS: str(self.checkpoints),
        }
        return dict(os.environ) | ours | more

    def ask_flush(
        self, purpose: Purpose = "leave", left_s: float = 20.0, *, rank: int | None = None, flush_id: int | None = None
    ) -> int:
        """Ask all ranks, or one, to save at a common step; returns the id their answers bear."""
        if flush_id is None:
            self._flush_id += 1
            flush_id = self._flush_id
        self._send(messages.FlushRequest(flush_id=flush_id, purpose=purpose, left_s=left_s, reason="test"), rank)
        return flush_id

    def leave(self, rank: int | None = None) -> None:
        """Tell all ranks, or one, to exit now."""
        self._send(messages.Leave(reason="test"), rank)

    def wait_for(self, kind: type[MessageT], *, rank: int | None = None, count: int = 1, timeout_s: float = 20.0) -> MessageT:
        """The `count`-th message of this kind, from `rank` or any. Raises TimeoutError that lists what came instead."""

        def found() -> list[MessageT]:
            return [m for sender, m in self.received if isinstance(m, kind) and rank in (None, sender)]

        with self._changed:
            if self._changed.wait_for(lambda: len(found()) >= count, timeout_s):
                return found()[count - 1]
            came = ", ".join(f"{sender}:{type(m).__name__}" for sender, m in self.received[-20:])
        raise TimeoutError(f"no {kind.__name__} ({count}) from rank {rank} within {timeout_s:g} s; came: {came or 'nothing'}")

    def wait_step(self, step: int, *, timeout_s: float = 20.0) -> None:
        """Wait until some rank has reported at least this step. Raises TimeoutError."""

        def reached() -> bool:
            return any(isinstance(m, messages.Progress) and m.step >= step for _, m in self.received)

        with self._changed:
            if not self._changed.wait_for(reached, timeout_s):
                raise TimeoutError(f"no rank reached step {step} within {timeout_s:g} s")

    def wait_gone(self, rank: int = 0, *, timeout_s: float = 20.0) -> None:
        """Wait until a rank's connection is closed. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._gone, timeout_s):
                raise TimeoutError(f"rank {rank} is still there after {timeout_s:g} s")

    def die(self) -> None:
        """Vanish like a killed supervisor: every connection closes."""
        with self._changed:
            doomed = [self._listener, *self._connections]
        for connection in doomed:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            except OSError:
                pass  # closed by the other side already
        self._listener.close()

    def _spawn(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self._connections[connection] = -1
            self._spawn(self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        lines = messages.LineBuffer()
        while True:
            try:
                chunk = connection.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                break
            with self._changed:
                for line in lines.feed(chunk):
                    message = messages.decode_from_rank(line)
                    if isinstance(message, messages.Hello):
                        self._connections[connection] = message.rank
                    self.received.append((self._connections[connection], message))
                self._changed.notify_all()
        with self._changed:
            self._gone.add(self._connections.pop(connection))
            self._changed.notify_all()
        connection.close()

    def _send(self, message: messages.ToRank, rank: int | None) -> None:
        """To ranks that have said hello; waits for the first one."""

        def targets() -> list[socket.socket]:
            return [c for c, who in self._connections.items() if who >= 0 and rank in (None, who)]

        with self._changed:
            if not self._changed.wait_for(targets, 20.0):
                raise TimeoutError(f"cannot send {type(message).__name__}: rank {'' if rank is None else rank} is not attached")
            connections = targets()
        for connection in connections:
            connection.sendall(messages.encode(message))


class CountingState:
    """A training state without torch: a counter and a random walk, in one JSON file, with real receipts."""

    def __init__(self) -> None:
        self.count = 0
        self.rng = 1
        self.fail_with: Exception | None = None
        """Raised by the next saves."""
        self.saves: list[SaveContext] = []
        self._rng_to_restore: int | None = None

    def train(self) -> int:
        """One step: count, and draw."""
        self.count += 1
        return self.draw()

    def draw(self) -> int:
        """The next random number, deterministic."""
        self.rng = self.rng * 6364136223846793005 % (1 << 63) + 1442695040888963407 % (1 << 31)
        return self.rng

    def save(self, folder: Path, context: SaveContext) -> Receipt:
        """See TrainingState."""
        if self.fail_with is not None:
            raise self.fail_with
        content = msgspec.json.encode(
            {
                "count": self.count,
                "rng": self.rng if context.rng is None else context.rng,
                "context": msgspec.structs.replace(context, rng=None),
            }
        )
        durable.make_folder(folder)
        name = layout.state_name(context.rank, context.world_size)
        durable.write(folder / name, content)
        receipt = Receipt(
            run_id=context.run_id,
            attempt=context.attempt,
            step=context.step,
            rank=context.rank,
            world_size=context.world_size,
            reason=context.reason,
            files=(FileEntry(name, len(content), digests.digest_buffers([content])),),
            metric=context.metric,
            epoch=context.epoch,
        )
        write_receipt(folder, receipt)
        self.saves.append(context)
        return receipt

    def load(self, folder: Path) -> Loaded:
        """See TrainingState."""
        path = next(iter(sorted(folder.glob("rank-*-of-*[0-9].json"))), None)
        if path is None:
            raise CheckpointError(f"cannot load {folder}: no state file")
        content = msgspec.json.decode(path.read_bytes())
        context = msgspec.convert(content["context"], SaveContext)
        self.count = content["count"]
        self._rng_to_restore = content["rng"]
        return Loaded(
            step=context.step,
            epoch=context.epoch,
            world_size=context.world_size,
            best=context.metric,
            values=context.values,
            config=context.config,
            size=path.stat().st_size,
        )

    def restore_rng(self) -> None:
        """See TrainingState."""
        if self._rng_to_restore is not None:
            self.rng, self._rng_to_restore = self._rng_to_restore, None

    def capture_rng(self) -> int:
        """See TrainingState."""
        return self.rng

    def apply_rng(self, rng: Any) -> None:
        """See TrainingState."""
        self.rng = rng

    def rates(self) -> dict[str, float]:
        """See TrainingState."""
        return {"lr": 0.1}

    def estimated_bytes(self) -> int:
        """See TrainingState."""
        return 1024


def eventually(condition: Any, what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition()` is true. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.005)
