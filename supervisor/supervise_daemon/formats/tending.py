"""What is done to the checkpoints of a folder besides choosing: sealed late, set aside, pruned. Failures are notes, never raised.

Another run's checkpoints are touched by none of these; links are handled as links.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervise_daemon.formats.sealed import has_manifest, read_unsealed
from supervise_hooks.contract import durable, layout, sealing
from supervise_hooks.contract.errors import CheckpointError, ContractError
from supervise_hooks.contract.retention import Kept, Retention, choose_prunable
from supervise_hooks.contract.verification import verify_sealed

_PRUNED = ".pruned-"
_LEFTOVER = re.compile(r"\.tmp-(step-\d{1,18}(-a\d{1,9})?|last|best)\.[0-9a-f]{8}|" + re.escape(_PRUNED) + r"step-.*-[0-9a-f]{8}")
_LEFTOVER_S = 600.0
"""Younger temporaries may be somebody's who is just about to rename them."""


def seal_ready(folder: Path, run_id: str, say: Callable[[str], None]) -> None:
    """Seal every checkpoint of this run whose receipts are all in: its last writer was killed before it could."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return  # absent, or unreadable: whoever chooses is told by `folder_state`
    for name in names:
        path = folder / name
        if layout.parse_step(name) is None or not path.is_dir() or has_manifest(path):
            continue
        try:
            unsealed = read_unsealed(path, time.time())
            manifest = sealing.seal(path)[0] if unsealed.run_id == run_id and unsealed.state != "writing" else None
        except (CheckpointError, ContractError, OSError) as error:
            say(str(error))
            continue
        if manifest is not None:
            say(f"sealed {name}: all its receipts were there")


def set_aside(path: Path, say: Callable[[str], None], why: str) -> Path | None:
    """Move a checkpoint to `set-aside/`, never deleting it; links are moved as links.

    Its new path; None when it stays, which is said, or is gone already.
    """
    target_dir = path.parent / layout.SET_ASIDE
    target = target_dir / path.name
    try:
        durable.make_folder(target_dir)
        number = 1
        while os.path.lexists(target):
            number += 1
            target = target_dir / f"{path.name}.{number}"
        durable.move(path, target)
    except FileNotFoundError:
        return None  # gone already: an operator, or another supervisor, was faster
    except OSError as error:
        say(f"cannot set {path} aside: {error.strerror}; it is passed over where it is")
        return None
    say(f"set aside {path.name}: {why} (now in {target_dir.name}/{target.name})")
    return target


def prune(folder: Path, policy: Retention, run_id: str, in_use: frozenset[str] = frozenset()) -> list[str]:
    """Delete what retention allows: renamed aside first, then removed, so that nobody sees half a checkpoint. Returns notes."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return [f"cannot prune {folder}: {error.strerror}"]
    notes = [note for name in names if _LEFTOVER.fullmatch(name) for note in _remove_leftover(folder / name, time.time())]
    kept = _survey(folder, names)
    used = {os.path.realpath(path) for path in in_use}  # the same folder may be spelled in another way
    guarded = frozenset(checkpoint.path for checkpoint in kept if os.path.realpath(checkpoint.path) in used)
    victims = {path for path, _ in choose_prunable(kept, policy, run_id, guarded)}
    linked = {
        os.path.realpath(folder / name) for name in names if os.path.islink(folder / name) and str(folder / name) not in victims
    }
    for path in sorted(victims):
        if os.path.islink(path) or os.path.realpath(path) not in linked:  # what a kept link leads to must stay
            notes += _delete(Path(path))
    return notes


def _survey(folder: Path, names: list[str]) -> list[Kept]:
    """Every sealed checkpoint, of whatever run, looked at quickly."""
    kept = []
    for name in names:
        path = folder / name
        if layout.parse_step(name) is None or not has_manifest(path):
            continue
        inspection, manifest = verify_sealed(path, "quick")
        if manifest is not None:
            whole = inspection.verdict == "WHOLE"
            kept.append(Kept(path=str(path), step=manifest.step, run_id=manifest.run_id, whole=whole, metric=manifest.metric))
    return kept


def _delete(path: Path) -> list[str]:
    aside = path.with_name(f"{_PRUNED}{path.name}-{secrets.token_hex(4)}")
    try:
        if path.is_symlink():
            path.unlink()
            return []
        os.rename(path, aside)
    except FileNotFoundError:
        return []  # another pruner was faster
    except OSError as error:
        return [f"cannot prune {path}: {error.strerror}; trying again later"]
    return _remove(aside)


def _remove_leftover(path: Path, now: float) -> list[str]:
    """Remove what an interrupted pruning or renaming left. `now` is wall time."""
    try:
        info = path.lstat()
        if path.name.startswith(_PRUNED) and stat.S_ISDIR(info.st_mode):
            return _remove(path)
        if now - info.st_mtime < _LEFTOVER_S:
            return []
        if stat.S_ISDIR(info.st_mode):
            return _remove(path)
        path.unlink()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"cannot remove {path}: {error.strerror}; trying again later"]
    return []


def _remove(path: Path) -> list[str]:
    """Remove as much of a folder as can be removed; the rest is tried again at the next pruning. Links in it are not followed."""
    failures: list[OSError] = []

    def failed(_: Any, __: str, info: Any) -> None:
        if not isinstance(info[1], FileNotFoundError):
            failures.append(info[1])

    with contextlib.suppress(FileNotFoundError):  # another pruner removes the same leftover
        shutil.rmtree(path, onerror=failed)
    return [f"cannot remove {path}: {failures[0].strerror}; trying again later"] if failures else []
