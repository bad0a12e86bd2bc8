"""The supervisor itself: start-up, idle memory and wake-ups, beside those of the torchrun agent it sits in front of."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from measure import Result, interleave

BIN = Path(sys.executable).parent
BUDGET_MIB, BUDGET_START_S = 30.0, 0.150


def measure(folder: Path) -> list[Result]:
    """Start-up: from exec to the job's first instruction, against starting the same job bare."""
    return [_start_up(folder), *_idle(folder)]


def _start_up(folder: Path) -> Result:
    job = [sys.executable, "-I", "-S", "-c", "import time; print(time.time(), flush=True)"]
    # Byte code is cached, as on any machine where the command is used twice.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["--quiet", "--run-root", str(folder / "runs"), "--fresh"]

    def bare() -> float:
        begun = time.time()
        return float(subprocess.run(job, capture_output=True, check=True).stdout) - begun

    def supervised() -> float:
        begun = time.time()
        argv = [str(BIN / "supervise"), *options, "--name", f"start-{time.monotonic_ns()}", "--", *job]
        return float(subprocess.run(argv, capture_output=True, check=True).stdout) - begun

    bare()
    supervised()  # byte-compile, warm the page cache
    seconds = interleave({"bare": bare, "supervised": supervised}, rounds=15)
    added = statistics.median(b - a for a, b in zip(seconds["bare"], seconds["supervised"], strict=True))
    return Result(
        name="supervisor start-up",
        ratio=BUDGET_START_S / added,
        target=1.0,
        measured=f"{added * 1e3:.0f} ms before the job starts (budget 150 ms); the job bare: {statistics.median(seconds['bare']) * 1e3:.0f} ms",
    )


def _idle(folder: Path) -> list[Result]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = folder / "idle.py"
    script.write_text("import time; time.sleep(1000)\n")
    argv = [str(BIN / "supervise"), "--quiet", "--run-root", str(folder / "runs"), "--name", "idle", "--grace", "1", "--"]
    process = subprocess.Popen(
        [*argv, str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "1", str(script)],
        env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        supervisor = psutil.Process(process.pid)
        while not any(
            "idle.py" in " ".join(child.cmdline()[:3])
            for child in supervisor.children(recursive=True)
            if child.name().startswith("python")
        ):
            time.sleep(0.1)
        time.sleep(3)
        agent = next(child for child in supervisor.children() if "torchrun" in " ".join(child.cmdline()))
        ours, theirs = supervisor.memory_info().rss / 2**20, agent.memory_info().rss / 2**20
        before = supervisor.num_ctx_switches()
        agent_before = agent.num_ctx_switches()
        time.sleep(5)
        woken = sum(supervisor.num_ctx_switches()) - sum(before)
        agent_woken = sum(agent.num_ctx_switches()) - sum(agent_before)
    finally:
        process.terminate()
        process.wait(timeout=60)
    return [
        Result(
            name="supervisor idle memory",
            ratio=BUDGET_MIB / ours,
            target=1.0,
            measured=f"{ours:.1f} MiB RSS (budget 30); the torchrun agent beside it: {theirs:.0f} MiB",
        ),
        Result(
            name="supervisor idle wake-ups",
            ratio=1.0 / (1 + woken),
            target=0.5,
            measured=f"{woken} context switches in 5 s (budget: none but declared polls); the torchrun agent: {agent_woken}",
        ),
    ]
