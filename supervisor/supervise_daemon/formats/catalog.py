"""The checkpoints of a folder: found, inspected, set aside, pruned. Effects; what to choose is decided in `core.resume`."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core.resume import Candidate, FolderState
from supervise_daemon.formats.registry import recognise
from supervise_daemon.formats.sealed import SealedFormat, writer_state
from supervise_hooks.contract import durable, layout, sealing
from supervise_hooks.contract.errors import CheckpointError, ContractError
from supervise_hooks.contract.manifest import Manifest, read_receipt
from supervise_hooks.contract.retention import Kept, Retention, choose_prunable
from supervise_hooks.contract.verification import Depth, Inspection, verify_sealed

_PRUNED = ".pruned-"
MAX_ENTRIES = 100_000
"""Entries of a folder that are looked at; a checkpoint folder has a handful."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a folder."""

    path: Path
    candidate: Candidate
    inspection: Inspection
    manifest: Manifest | None = None


def folder_state(folder: Path) -> FolderState:
    """Whether there is a folder to look into."""
    try:
        with os.scandir(folder) as entries:
            return "ok" if any(True for _ in entries) else "empty"
    except FileNotFoundError:
        return "absent"
    except NotADirectoryError:
        return "not a folder"
    except OSError:
        return "unreadable"


def scan(folder: Path, depth: Depth = "quick", on_bytes: Callable[[int], None] | None = None) -> list[Found]:
    """Every checkpoint directly in `folder`, ours or of another format. Raises OSError when the folder itself cannot be read."""
    found = []
    with os.scandir(folder) as entries:
        for index, entry in enumerate(entries):
            if index >= MAX_ENTRIES:
                break
            if entry.name.startswith(".") or entry.name in (layout.SET_ASIDE, layout.LAST, layout.BEST):
                continue
            checkpoint = look(Path(entry.path), depth, on_bytes)
            if checkpoint is not None:
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: (checkpoint.candidate.step or -1, checkpoint.candidate.attempt), reverse=True)


def look(path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Found | None:
    """One entry as a checkpoint; None when it is none."""
    form = recognise(path)
    if form is None:
        return None
    if not isinstance(form, SealedFormat):
        inspection = form.inspect(path, depth, on_bytes)
        state = "torn" if inspection.verdict == "TORN" else "unknown"
        candidate = Candidate(path=str(path), step=inspection.step, run_id=None, state=state, problems=inspection.problems)  # type: ignore[arg-type]
        return Found(path=path, candidate=candidate, inspection=inspection)
    inspection, manifest = verify_sealed(path, depth, on_bytes)
    if manifest is None and not (path / layout.MANIFEST).exists():
        state, run_id, attempt, problems = writer_state(path)
        inspection = msgspec.structs.replace(inspection, problems=problems)
        candidate = Candidate(
            path=str(path), step=layout.parse_step(path.name), run_id=run_id, attempt=attempt, state=state, problems=problems
        )
        return Found(path=path, candidate=candidate, inspection=inspection)
    candidate = Candidate(
        path=str(path),
        step=inspection.step,
        run_id=manifest.run_id if manifest is not None else None,
        attempt=manifest.attempt if manifest is not None else 0,
        state="whole" if inspection.verdict == "WHOLE" else "torn",
        problems=inspection.problems,
    )
    return Found(path=path, candidate=candidate, inspection=inspection, manifest=manifest)


def seal_ready(folder: Path, say: Callable[[str], None]) -> None:
    """Seal every checkpoint whose receipts are all in: its last writer was killed before it could."""
    try:
        names = os.listdir(folder)
    except OSError:
        return  # absent, or unreadable: `folder_state` tells
    for name in names:
        path = folder / name
        if layout.parse_step(name) is None or (path / layout.MANIFEST).exists() or path.is_symlink():
            continue
        try:
            manifest, _ = sealing.seal(path)
        except (CheckpointError, OSError) as error:
            say(str(error))
            continue
        if manifest is not None:
            say(f"sealed {name}: all its receipts were there")


def set_aside(path: Path, say: Callable[[str], None], why: str) -> bool:
    """Move a checkpoint to `set-aside/`, never deleting it; links are moved as links. A failure is said, not raised."""
    target_dir = path.parent / layout.SET_ASIDE
    try:
        durable.make_folder(target_dir)
        target = target_dir / path.name
        number = 1
        while os.path.lexists(target):
            number += 1
            target = target_dir / f"{path.name}.{number}"
        durable.move(path, target)
    except OSError as error:
        say(f"cannot set {path} aside: {error.strerror}; it is passed over where it is")
        return False
    say(f"set aside {path.name}: {why} (now in {target_dir.name}/{target.name})")
    return True


def prune(folder: Path, policy: Retention, run_id: str, in_use: frozenset[str] = frozenset()) -> list[str]:
    """Delete what retention allows: renamed aside first, then removed, so that nobody sees half a checkpoint. Returns notes."""
    notes: list[str] = []
    try:
        names = os.listdir(folder)
    except OSError as error:
        return [f"cannot prune {folder}: {error.strerror}"]
    for name in names:
        if name.startswith(_PRUNED):  # left by an earlier, interrupted pruning
            notes += _remove(folder / name)
    kept = []
    for name in names:
        path = folder / name
        if layout.parse_step(name) is None or not (path / layout.MANIFEST).exists():
            continue
        inspection, manifest = verify_sealed(path, "quick")
        if manifest is not None:
            whole = inspection.verdict == "WHOLE"
            kept.append(Kept(path=str(path), step=manifest.step, run_id=manifest.run_id, whole=whole, metric=manifest.metric))
    for victim, _ in choose_prunable(kept, policy, run_id, in_use):
        path = Path(victim)
        if path.is_symlink():
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        aside = folder / f"{_PRUNED}{path.name}-{secrets.token_hex(4)}"
        try:
            os.rename(path, aside)
        except OSError as error:
            notes.append(f"cannot prune {path}: {error.strerror}")
            continue
        notes += _remove(aside)
    return notes


def _remove(path: Path) -> list[str]:
    """Remove a folder; what cannot be removed now is tried again at the next pruning."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"cannot remove {path}: {error.strerror}; trying again later"]
    return []


def lineage(path: Path) -> tuple[str | None, int]:
    """(run id, attempt) that receipts in an unsealed checkpoint name; (None, 0) without a readable one."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(path)):
            parsed = layout.parse_rank_file(name)
            if parsed and parsed[2] == "receipt.json":
                with contextlib.suppress(ContractError, OSError):
                    receipt = read_receipt(path, parsed[0], parsed[1])
                    return receipt.run_id, receipt.attempt
    return None, 0


def relook(path: Path, depth: Depth, wait_s: float, pause: Callable[[float], None] = time.sleep) -> Found | None:
    """Look again for a while when a file is missing: on network filesystems a peer's file may appear a little later."""
    found = look(path, depth)
    waited = 0.0
    while found is not None and waited < wait_s and any("is missing" in problem for problem in found.inspection.problems):
        pause(0.5)
        waited += 0.5
        found = look(path, depth)
    return found


