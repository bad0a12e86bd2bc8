"""From which checkpoint a script starts when it attaches, and what it is told of it. Loading is the `TrainingState`'s matter."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from supervise_hooks.contract import env, layout
from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.contract.manifest import Manifest
from supervise_hooks.contract.verification import verify_sealed
from supervise_hooks.state import Loaded, TrainingState
from supervise_hooks.summary import Teller, checkpoint_line, differences, shown_values

AUTO = "auto"


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where training begins."""

    path: Path | None = None
    """None: a fresh start."""
    loaded: Loaded | None = None
    manifest: Manifest | None = None
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Completed steps at the start."""
        return 0 if self.loaded is None else self.loaded.step


def wanted(resume: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> str:
    """A path, `auto`, or nothing for a fresh start. An explicit path beats the environment; `auto` leaves it to a supervisor."""
    if resume is not None and os.fspath(resume) != AUTO:
        return os.fspath(resume)
    if env.RESUME in environ:
        return environ[env.RESUME]
    return AUTO if resume is not None else ""


def choose_newest(base: Path) -> tuple[str, list[str]]:
    """(path of the newest whole checkpoint by step, or nothing; why each newer one was passed over)."""
    passed: list[str] = []
    found = [(step, folder) for folder in _folders(base) if (step := layout.parse_step(folder.name)) is not None]
    for _, folder in sorted(found, key=lambda pair: (pair[0], pair[1].name), reverse=True):
        inspection, _ = verify_sealed(folder, "full")
        if inspection.verdict == "WHOLE":
            return str(folder), passed
        passed.append(f"{folder}: {inspection.problems[0]}")
    return "", passed


def _folders(base: Path) -> list[Path]:
    return [folder for folder in base.iterdir() if folder.is_dir()] if base.is_dir() else []


def load(state: TrainingState, path: str) -> Start:
    """Restore everything but random state from a checkpoint proved whole quickly. Raises CheckpointError."""
    if not path:
        return Start()
    folder = Path(path).resolve()  # `last` is a link that will move on
    began = time.monotonic()
    inspection, manifest = verify_sealed(folder, "quick")
    if inspection.verdict != "WHOLE":
        raise CheckpointError(f"cannot resume from {folder}: {'; '.join(inspection.problems[:3])}")
    loaded = state.load(folder)
    return Start(path=folder, loaded=loaded, manifest=manifest, seconds=time.monotonic() - began)


def tell(start: Start, config: dict[str, Any] | None, rates: dict[str, float], teller: Teller) -> None:
    """The resume line, the loader's notes, and each difference of configuration."""
    loaded = start.loaded
    if loaded is None:
        teller.news("fresh start at step 0")
        return
    facts = {
        "epoch": loaded.epoch,
        "step": loaded.step,
        "values": shown_values(loaded.values, rates),
        "size": loaded.size,
        "seconds": start.seconds,
    }
    teller.news(checkpoint_line("resumed from", str(start.path), facts))
    for note in loaded.notes:
        teller.news(f"note: {note}")
    known = loaded.config is not None and config is not None
    for difference in differences(loaded.config or {}, config or {}) if known else []:
        teller.news(f"config differs from the checkpoint's: {difference}")
