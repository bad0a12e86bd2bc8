"""One rank's save from folder to seal: choose the folder, write, seal, point `last` and `best`, prune when alone.

When to save is decided in `session`; what is written is the `TrainingState`'s matter.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_hooks.contract import durable, layout, retention
from supervise_hooks.contract.errors import CheckpointError, ContractError
from supervise_hooks.contract.manifest import Manifest, read_manifest
from supervise_hooks.contract.sealing import seal
from supervise_hooks.contract.verification import verify_sealed
from supervise_hooks.state import SaveContext, TrainingState
from supervise_hooks.summary import Teller


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where checkpoints live and how many stay."""

    folder: Path
    retention: retention.Retention
    in_use: frozenset[str] = frozenset()
    """Paths never pruned: the one this attempt started from."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a save came to."""

    path: Path
    size: int
    """Bytes this rank wrote; 0 if it was there already."""
    seconds: float
    sealed: bool
    """This call completed the checkpoint: the rank was the last to arrive."""


def choose_folder(base: Path, step: int, run_id: str, attempt: int) -> tuple[Path, bool]:
    """(folder for this step, whether this attempt already sealed it). What others sealed is never written over.

    Every rank must choose alike though they look at different moments: a folder of this save is not sealed before the last
    rank has chosen, and a complete but unsealed one of somebody else is sealed here first, so all ranks find it so.
    Raises CheckpointError.
    """
    for name in (layout.step_name(step), layout.step_name(step, attempt)):
        folder = base / name
        try:
            manifest = _manifest(folder)
        except ContractError:
            continue  # a damaged seal is evidence, not debris: it is left alone
        if manifest is None:
            return folder, False
        if (manifest.run_id, manifest.attempt) == (run_id, attempt):
            return folder, True
    raise CheckpointError(f"cannot save step {step}: {folder} exists and is sealed by another run")


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except FileNotFoundError:
        return seal(folder)[0] if folder.is_dir() else None


def save(state: TrainingState, place: Place, context: SaveContext) -> Written:
    """Write this rank's part durably, then seal if it was the last. Raises CheckpointError; older checkpoints are untouched."""
    began = time.monotonic()
    folder, exists = choose_folder(place.folder, context.step, context.run_id, context.attempt)
    if exists:
        return Written(path=folder, size=0, seconds=0.0, sealed=False)
    receipt = state.save(folder, context)
    manifest, reason = seal(folder)
    if manifest is not None and (manifest.run_id, manifest.attempt) != (context.run_id, context.attempt):
        raise CheckpointError(f"cannot seal {folder}: files of run {manifest.run_id} lie there")
    if manifest is None and reason.startswith("cannot "):  # not merely waiting for the others' receipts
        raise CheckpointError(f"{folder} stays unsealed: {reason}")
    size = sum(entry.size for entry in receipt.files)
    sealed = manifest is not None and reason != "already sealed"
    return Written(path=folder, size=size, seconds=time.monotonic() - began, sealed=sealed)


def wait_sealed(folder: Path, left_s: Callable[[], float]) -> bool:
    """Wait until every rank's part is there: a rank that ends early makes torchrun stop the others in mid-save."""
    while not (folder / layout.MANIFEST).exists():
        if left_s() <= 0:
            return False
        time.sleep(0.02)
    return True


def after_seal(place: Place, run_id: str, prune: bool, teller: Teller) -> None:
    """Point the links at the new state of the folder and, if asked, prune. Failures are told, never raised."""
    try:
        kept = _survey(place.folder, run_id)
        if kept:
            newest = max(kept, key=lambda checkpoint: checkpoint.step)
            durable.point(place.folder / layout.LAST, Path(newest.path).name)
        best = retention.choose_best(kept)
        if best is not None:
            durable.point(place.folder / layout.BEST, Path(best.path).name)
        if prune:
            for path, reason in retention.choose_prunable(kept, place.retention, run_id, place.in_use):
                if _remove(Path(path)):
                    teller.news(f"removed {path}: {reason}")
    except (OSError, ContractError) as error:
        teller.trouble(f"the checkpoint is sealed, but links and old ones in {place.folder} could not be tended: {error}")


def _survey(base: Path, run_id: str) -> list[retention.Kept]:
    """This run's checkpoints that are quickly proved whole."""
    kept = []
    for folder in base.iterdir():
        if layout.parse_step(folder.name) is None or not (folder / layout.MANIFEST).exists():
            continue
        inspection, manifest = verify_sealed(folder, "quick")
        if manifest is not None and manifest.run_id == run_id:
            kept.append(
                retention.Kept(
                    path=str(folder),
                    step=manifest.step,
                    run_id=run_id,
                    whole=inspection.verdict == "WHOLE",
                    metric=manifest.metric,
                )
            )
    return kept


def _remove(folder: Path) -> bool:
    """Rename aside first: a half-removed checkpoint never bears a checkpoint's name. False: a peer was faster (both saw all receipts)."""
    if folder.is_symlink():  # its target is somebody else's to remove
        folder.unlink(missing_ok=True)
        return True
    doomed = folder.with_name(durable.temp_name(folder.name))
    try:
        durable.move(folder, doomed)
    except FileNotFoundError:
        return False
    shutil.rmtree(doomed)
    return True
