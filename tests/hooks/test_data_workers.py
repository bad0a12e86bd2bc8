"""Data workers live through a SIGTERM to the whole tree, obey their own rank, and do not outlive it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.process]

SCRIPT = """
import multiprocessing, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from supervise_hooks.integrations.data import shield, wrap

class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(32))

def check(worker):
    assert isinstance(get_worker_info().dataset, (Data, Stream))  # not a wrapper of ours

if __name__ == "__main__":
    kind, context, persistent, blocked = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4] == "True"
    if blocked:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    made = DataLoader(Stream() if kind == "stream" else Data(), 2, num_workers=2, persistent_workers=persistent,
                      multiprocessing_context=context, worker_init_fn=check)
    if kind == "evaluation":
        shield(made)
        loader = made
    else:
        loader = wrap(made)
    batches = iter(loader)
    count = sum(1 for _ in zip(range(4), batches))
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    sys.stdin.readline()
    count += sum(1 for _ in batches)
    print(count, flush=True)
    half = iter(loader)
    next(half), next(half)  # one of each worker: a spawned one that finds us gone while it starts complains on stderr
    if kind == "dropped":
        del half, batches
        print("dropped", flush=True)
    elif kind == "waits":
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The script's TMPDIR; tmp_path is too long for the names of multiprocessing's sockets."""
    with tempfile.TemporaryDirectory(prefix="sup") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the script above; kills what a failed test leaves."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def begin(kind: str, context: str = "fork", persistent: bool = False, blocked: bool = False) -> subprocess.Popen[str]:
        environ = {**os.environ, "TMPDIR": str(temporary)}
        words = [sys.executable, str(script), kind, context, str(persistent), str(blocked)]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        _, errors = process.communicate(timeout=20)
        pytest.fail(f"the script ended with {process.returncode}: {errors}")
    return [int(word) for word in text.split()]


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("kind", "context", "persistent", "blocked"),
    [
        ("plain", "fork", False, False),
        ("plain", "fork", False, True),
        ("plain", "fork", True, True),
        ("plain", "spawn", False, True),
        ("plain", "forkserver", True, False),
        ("stream", "fork", False, True),
        ("evaluation", "fork", False, False),
    ],
)
def test_term_to_workers_is_survived(
    start: Callable[..., subprocess.Popen[str]], temporary: Path, kind: str, context: str, persistent: bool, blocked: bool
) -> None:
    """Workers TERMed by a third process deliver every batch, and a loader read half-way does not hang the exit."""
    process = start(kind, context, persistent, blocked)
    workers = line(process)
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    tell(process)
    assert line(process) == [32]
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert errors == ""
    assert all(gone(pid) for pid in workers)
    assert list(temporary.iterdir()) == []


def test_dropped_iterator_ends_its_workers(start: Callable[..., subprocess.Popen[str]]) -> None:
    """An iterator given up half-way ends its workers although SIGTERM is blocked from the beginning."""
    process = start("dropped", "fork", False, True)
    line(process)
    tell(process)
    assert line(process) == [32]
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (0, "dropped\n", "")


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_workers_leave_with_a_killed_rank(start: Callable[..., subprocess.Popen[str]], temporary: Path, context: str) -> None:
    """A rank that is SIGKILLed takes its workers along at once, not at torch's next look in up to 5 s; they leave no files."""
    process = start("waits", context, False, True)
    line(process)
    tell(process)
    assert line(process) == [32]
    workers = line(process)
    assert len(workers) == 2
    process.kill()
    deadline = time.monotonic() + 3
    while not all(gone(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their rank"
        time.sleep(0.01)
    if context == "fork":  # under forkserver the rank itself has a folder, which nobody can remove for it
        assert list(temporary.iterdir()) == []
