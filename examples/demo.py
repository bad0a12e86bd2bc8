"""`make demo`: one training run that is preempted, loses a rank and finds its newest checkpoint torn, and ends as if nothing had happened.

Trains examples/gpt twice under torchrun with two ranks: once undisturbed, once under `supervise` while this script attacks it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from supervise_daemon.runtime.status import Status, read_status
from supervise_hooks.contract import layout
from supervise_hooks.contract.errors import ContractError

STEPS = 160
TRAIN = Path(__file__).parent / "gpt" / "train.py"
BIN = Path(sys.executable).parent
console = Console(highlight=False, soft_wrap=True)


def command(work: Path, name: str) -> list[str]:
    """The training command a user would type."""
    return [
        str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(TRAIN), "--steps", str(STEPS), "--save-every", "25",
        "--eval-every", "50", "--weights", str(work / f"{name}.digest"), "--sample-log", str(work / f"{name}.samples"),
    ]  # fmt: skip


def environment(work: Path, name: str) -> dict[str, str]:
    """Ours, plus one thread a rank (two cores) and a quiet torchrun."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
        "SUPERVISE_CHECKPOINTS": str(work / f"{name}-checkpoints"),
    }


def act(title: str, text: str = "") -> None:
    """Announce what happens next."""
    console.print()
    console.print(Rule(f"[bold]{title}", align="left", style="cyan"))
    if text:
        console.print(f"[cyan]{text}")


class Screen:
    """Shows a run line by line: ours in colour, the job's own dimmed, launchers' tracebacks as a count."""

    def __init__(self, work: Path) -> None:
        self._work = str(work)
        self._hidden = 0

    def show(self, line: str) -> None:
        """One line."""
        line = line.rstrip().replace(self._work, "…")
        if line.startswith(("supervise ", "supervise:", "step ")):
            if self._hidden:
                console.print(
                    f"  ({self._hidden} lines of tracebacks of torchrun and the ranks; `supervise logs` has them)",
                    style="dim italic",
                )
                self._hidden = 0
            ours = line.startswith("supervise ")
            console.print(line if ours else f"  {line}", style="bold green" if ours else "dim", markup=False)
        elif line:
            self._hidden += 1


@contextlib.contextmanager
def supervised(work: Path) -> Iterator[subprocess.Popen[str]]:
    """The run under attack; its output is shown while the block runs, and it is gone afterwards."""
    argv = [
        str(BIN / "supervise"), "--name", "demo", "--run-root", str(work / "runs"), "--requeue", "local", "--relaunch-delay", "0.2",
        "--grace", "30", "--backoff-first", "0.2", "--checkpoints", str(work / "demo-checkpoints"), "--", *command(work, "demo"),
    ]  # fmt: skip
    console.print(f"[bold]$ supervise --requeue local torchrun --nproc-per-node 2 train.py --steps {STEPS}")
    process = subprocess.Popen(
        argv,
        env=environment(work, "demo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        bufsize=1,
    )
    assert process.stdout is not None
    screen = Screen(work)
    reader = threading.Thread(target=lambda: [screen.show(line) for line in process.stdout or ()], daemon=True)
    reader.start()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        reader.join(timeout=10)


def wait_for(
    process: subprocess.Popen[str], work: Path, what: str, met: Callable[[Status], bool], timeout_s: float = 90
) -> Status:
    """The first status that meets the condition. Ends the demo when the run ends or time runs out before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ContractError):
            status = read_status(work / "runs" / "demo" / "status.json")
            if met(status):
                return status
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"the demo waited in vain for {what}; exit code of supervise so far: {process.poll()}")


def at_step(step: int, attempt: int) -> Callable[[Status], bool]:
    """Running in that attempt, with that many steps done."""
    return lambda status: status.phase == "RUNNING" and status.attempt >= attempt and (status.step or 0) >= step


def tear_newest(folder: Path) -> Path:
    """Cut the newest checkpoint's first file in half, as a crash of the machine would."""
    newest = max(
        (path for path in folder.iterdir() if (path / layout.MANIFEST).exists() and layout.parse_step(path.name) is not None),
        key=lambda path: layout.parse_step(path.name) or 0,
    )
    victim = next(newest.glob("*.safetensors"))
    os.truncate(victim, victim.stat().st_size // 2)
    return victim


def attack(work: Path) -> Status:
    """Preempt, kill a rank, tear a checkpoint; the final status."""
    with supervised(work) as process:
        wait_for(process, work, "step 30", at_step(30, 1))
        act("A preemption notice", f"kill -TERM {process.pid}   (supervise; torchrun and the ranks never see it)")
        process.send_signal(signal.SIGTERM)

        status = wait_for(process, work, "step 60", at_step(60, 2))
        pid = status.ranks["1"].pid
        act("A rank is killed in the middle of a step", f"kill -KILL {pid}   (rank 1)")
        os.kill(pid, signal.SIGKILL)

        wait_for(
            process,
            work,
            "the checkpoint of step 100",
            lambda status: at_step(105, 3)(status) and (status.newest_step or 0) >= 100,
        )
        victim = tear_newest(work / "demo-checkpoints")
        status = read_status(work / "runs" / "demo" / "status.json")
        act(
            "The newest checkpoint is torn, then every rank is killed",
            f"truncate {victim.parent.name}/{victim.name}; kill -KILL both ranks",
        )
        for rank in status.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)

        status = wait_for(process, work, "the end", lambda status: status.phase == "ENDED")
        process.wait(timeout=60)
    return status


def samples(work: Path, name: str) -> list[str]:
    """What each rank consumed, step by step; of a step that was done again, the last time counts."""
    lines = []
    for rank in (0, 1):
        steps = {line.split()[0]: line for line in (work / f"{name}.samples.rank{rank}").read_text().splitlines()}
        lines += [f"rank {rank}: {line}" for _, line in sorted(steps.items(), key=lambda item: int(item[0]))]
    return lines


def main() -> int:
    """Run the demo; exit code 0 if both runs ended identical."""
    begun = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="supervise-demo-"))
    try:
        act("First, undisturbed", "the run to compare with: plain torchrun, nobody supervises")
        console.print(f"[bold]$ torchrun --nproc-per-node 2 train.py --steps {STEPS}")
        plain = subprocess.run(
            command(work, "plain"), env=environment(work, "plain"), capture_output=True, text=True, errors="replace", check=False
        )
        if plain.returncode != 0:
            console.print(plain.stdout + plain.stderr, markup=False)
            return 1
        for line in plain.stdout.splitlines()[-3:]:
            console.print(f"  {line}", style="dim", markup=False)

        act("Now supervised, and attacked three times")
        status = attack(work)

        act("What became of it")
        console.print(
            f"attempts {status.attempt}, preemptions {status.preemptions}, crashes {status.crashes}, steps done twice {status.lost_steps_total}"
        )
        console.print(
            subprocess.run(
                [BIN / "supervise", "checkpoints", work / "demo-checkpoints", "--run-id", "demo"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout,
            markup=False,
        )
        rows = []
        for name in ("plain", "demo"):
            rows.append((work / f"{name}.digest").read_text().strip())
            console.print(f"final weights and optimizer, {'undisturbed' if name == 'plain' else 'attacked   '}: [bold]{rows[-1]}")
        same_samples = samples(work, "plain") == samples(work, "demo")
        console.print(f"consumed samples, step by step: {'identical' if same_samples else 'DIFFERENT'}")
        if rows[0] != rows[1] or not same_samples:
            console.print("[bold red]The runs differ.")
            return 1
        console.print(f"\n[bold green]Identical, bit for bit. {time.monotonic() - begun:.0f} s in all.")
        return 0
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
