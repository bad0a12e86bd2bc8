"""A real `supervise` in a folder of its own, with what a test wants to know about it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kit.eventually import eventually
from supervise_daemon.runtime.run_dir import RunDir, sweep_private_dirs
from supervise_daemon.runtime.status import Status, read_status
from supervise_daemon.runtime.tree import find_marked
from supervise_hooks.contract.errors import ContractError

TOY = Path(__file__).with_name("toy_rank.py")
PYTHON = sys.executable


class Supervised:
    """Starts `supervise --name run ...` in `folder`; `close` ends whatever a failed test left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / ".supervise" / "run"
        self.process: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []

    def environ(self, **more: str) -> dict[str, str]:
        """A clean environment: nothing of the machine's own settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SUPERVISE_", "SLURM_"))}
        runtime = self.folder / "rt"
        runtime.mkdir(exist_ok=True)
        return {**kept, "HOME": str(self.folder), "XDG_RUNTIME_DIR": str(runtime) if len(str(runtime)) < 60 else "", **more}

    def start(
        self, *words: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start with these options and command."""
        argv = [*prefix, PYTHON, "-m", "supervise_daemon", "run", "--name", "run", *words]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True} | options
        self.process = subprocess.Popen(argv, cwd=self.folder, env=self.environ(**(env or {})), **options)
        self.started.append(self.process)
        return self.process

    def toy(self, *options: str, words: tuple[str, ...] = (), **env: str) -> subprocess.Popen[bytes]:
        """Start the toy rank, saving to `folder/c`."""
        return self.start(
            "--checkpoints", "c", *options, "--", PYTHON, str(TOY), *words, env={"TOY_LOG": str(self.folder / "log"), **env}
        )

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Another verb, to its end."""
        return subprocess.run(
            [PYTHON, "-m", "supervise_daemon", *words],
            cwd=self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )

    def end(self, timeout_s: float = 40) -> tuple[int, str]:
        """Exit code and everything printed."""
        assert self.process is not None
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, (out or b"").decode(errors="replace")

    def status(self) -> Status | None:
        """What status.json says, if it is there."""
        try:
            return read_status(self.run / "status.json")
        except (FileNotFoundError, ContractError):
            return None

    def reach(self, phase: str, step: int = 0, attempt: int = 1) -> Status:
        """The first status of that phase, with at least that many steps done."""

        def look() -> Status | None:
            status = self.status()
            met = (
                status
                and (status.phase, status.attempt) >= (phase, attempt)
                and status.phase == phase
                and (status.step or 0) >= step
            )
            return status if met else None

        return eventually(look, f"{phase} of attempt {attempt} at step {step}")

    def journal(self, kind: str = "step") -> list[dict[str, Any]]:
        """Lines of the journal of one kind."""
        lines = (self.run / "journal.jsonl").read_bytes().splitlines() if (self.run / "journal.jsonl").exists() else []
        return [record for record in map(json.loads, filter(None, lines)) if record["kind"] == kind]

    def attempts(self) -> list[dict[str, Any]]:
        """What the toy rank logged, an entry an attempt."""
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]

    def survivors(self) -> list[int]:
        """Live processes of any attempt of this run, whoever their parent is."""
        markers = {record["memory"]["marker"] for record in self.journal("memory")} - {None}
        return [process.pid for marker in markers for process in find_marked(marker)]

    def close(self) -> None:
        """Leave nothing behind, not even after a failed test."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)
            if process.stdout:
                process.stdout.close()
        for pid in self.survivors():
            os.kill(pid, signal.SIGKILL)
        if self.run.exists():
            sweep_private_dirs(RunDir(self.run.parent, self.run.name).owner_key(), keep=Path())
