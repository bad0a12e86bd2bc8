"""A supervised run under attack: start it, look at it, strike it at a chosen moment, and prove at the end that nothing is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from supervise_daemon.runtime.run_dir import RunDir, sweep_private_dirs
from supervise_daemon.runtime.status import Status, read_status
from supervise_hooks.contract import env
from supervise_hooks.contract.errors import ContractError

BIN = Path(sys.executable).parent
TRAIN = Path(__file__).parent.parent / "e2e" / "drill_train.py"


def torchrun(work: Path, name: str, *arguments: str) -> list[str]:
    """The training command."""
    return [
        str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(TRAIN), "--out", str(work / name), *arguments,
    ]  # fmt: skip


def environment(work: Path, name: str) -> dict[str, str]:
    """One thread a rank; checkpoints beside the outputs. torchrun leaves a folder in TMPDIR at every end (2.13)."""
    temporary = work / "tmp"
    temporary.mkdir(exist_ok=True)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "DRILL_DIR": str(work),
        "TMPDIR": str(temporary),
        "SUPERVISE_CHECKPOINTS": str(work / f"{name}-checkpoints"),
    }


class Victim:
    """One run called `drill` in `work`, started again whenever its supervisor ends or is killed."""

    def __init__(
        self, work: Path, train_arguments: list[str], options: list[str] | None = None, wrap: list[str] | None = None
    ) -> None:
        """`options` go to supervise, `wrap` stands between it and torchrun."""
        self.work = work
        self.status_path = work / "runs" / "drill" / "status.json"
        self.log = work / "supervise.log"
        self.environ = environment(work, "drill")
        self.argv = [
            str(BIN / "supervise"), "--name", "drill", "--run-root", str(work / "runs"), "--grace", "20",
            "--max-crashes", "10000", "--backoff-first", "0.05", "--backoff-max", "0.2", *(options or []),
            "--", *(wrap or []), *torchrun(work, "drill", *train_arguments),
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None
        self.exit_codes: list[int] = []

    def start(self, *before: str, own_group: bool = False) -> None:
        """Start a supervisor; `before` are words in front of it."""
        for page in self.work.glob("phase.rank*"):
            page.unlink()  # what the last attempt was doing
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*before, *self.argv], env=self.environ, stdout=log, stderr=log, start_new_session=own_group
            )

    def wait_training(self, step: int, attempt: int = 1, timeout_s: float = 40) -> Status:
        """The status once training has got that far in that attempt; AssertionError with the log when it does not."""

        def there() -> bool:
            status = self.status()
            return status is not None and status.phase == "RUNNING" and status.attempt >= attempt and (status.step or 0) >= step

        assert self.wait(there, timeout_s, patient=True), (
            f"training did not reach step {step}: {self.log.read_text(errors='replace')[-3000:]}"
        )
        status = self.status()
        assert status is not None
        return status

    def end(self, timeout_s: float = 40) -> int:
        """Wait for the supervisor's end; its exit code."""
        assert self.process is not None
        return self.process.wait(timeout=timeout_s)

    def clear(self) -> None:
        """Whatever a failed test left of this run goes away."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        while tree := self.tree():
            sigkill(tree)
        if self.status_path.parent.exists():
            sweep_private_dirs(RunDir(self.work / "runs", "drill").owner_key(), keep=Path())

    def events(self) -> list[dict[str, Any]]:
        """Steps of the journal."""
        lines = (self.status_path.parent / "journal.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]

    def ensure(self) -> None:
        """Start one if none runs and the job has not finished."""
        if self.process is None or self.process.poll() is not None:
            if self.process is not None:
                self.exit_codes.append(self.process.returncode)
            self.start()

    @property
    def finished(self) -> bool:
        """The supervisor has said that the job is done."""
        return self.process is not None and self.process.poll() == 0

    def status(self) -> Status | None:
        """What status.json says, if it can be read just now."""
        with contextlib.suppress(FileNotFoundError, ContractError):
            return read_status(self.status_path)
        return None

    def ranks(self) -> dict[int, psutil.Process]:
        """The training processes of the live attempt, by rank, attached or not."""
        found = {}
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                values = process.environ()
                parent = process.parent()
                # Data workers inherit the environment of their rank: a rank's parent is no rank itself.
                if "LOCAL_RANK" in values and (parent is None or "LOCAL_RANK" not in parent.environ()):
                    found[int(values["RANK"])] = process
        return found

    def workers(self) -> list[psutil.Process]:
        """Data-loading children of the ranks."""
        found = []
        for rank in self.ranks().values():
            with contextlib.suppress(psutil.Error):
                found += rank.children(recursive=True)
        return found

    def leader(self) -> psutil.Process | None:
        """The torchrun process."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                if "LOCAL_RANK" not in process.environ() and "torchrun" in " ".join(process.cmdline()):
                    return process
        return None

    def tree(self) -> list[psutil.Process]:
        """Every process that carries a marker of this run, whoever its parent is."""
        wanted = f"{env.RUN_DIR}={self.status_path.parent}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(psutil.Process(pid))
        return [process for process in found if _alive(process)]

    def doing(self, rank: int = 0) -> str:
        """What a rank says it is doing."""
        try:
            return (self.work / f"phase.rank{rank}").read_text().strip()
        except FileNotFoundError:
            return ""

    def saving(self) -> bool:
        """Whether a rank is writing a checkpoint right now."""
        return any((self.work / "drill-checkpoints").glob("step-*/*.writing"))

    def steps_done(self) -> int:
        """Steps in rank 0's log, about: lines are of one length."""
        log = self.work / "drill.samples.rank0"
        return log.stat().st_size // 110 if log.exists() else 0

    def wait(self, met: Callable[[], object], timeout_s: float, patient: bool = False) -> bool:
        """Poll tightly until something is true (and say so), the supervisor ends, time or the training runs on."""
        deadline = time.monotonic() + timeout_s
        before = self.steps_done()
        while time.monotonic() < deadline and (patient or self.steps_done() < before + 40):
            if met():
                return True
            if self.process is None or self.process.poll() is not None:
                return False
            time.sleep(0.003)
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process | None, number: int) -> bool:
    """Signal a process that may be gone already."""
    if process is None:
        return False
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
        return True
    return False


def sigkill(processes: list[psutil.Process]) -> bool:
    """Kill several at once, as nearly as can be."""
    return any([send(process, signal.SIGKILL) for process in processes])


def effective_log(path: Path) -> list[str]:
    """A rank's sample log as one run would have written it: of a step done again, all its lines must be equal.

    A torn last line of a killed rank cannot occur: a line is one `write`.
    """
    steps: dict[int, str] = {}
    for line in path.read_text().splitlines():
        step = int(line.split(" ", 1)[0])
        assert steps.setdefault(step, line) == line, f"step {step} was done again differently:\n{steps[step]}\n{line}"
    return [steps[step] for step in sorted(steps)]
