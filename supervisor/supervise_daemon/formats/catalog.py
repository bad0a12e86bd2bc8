"""The checkpoints of a folder, found and inspected. Nothing is changed here: that is `tending`; choosing is `choosing`."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core.resume import Candidate, FolderState, State, order
from supervise_daemon.formats.registry import recognise
from supervise_daemon.formats.sealed import SealedFormat, has_manifest, inspect_sealed
from supervise_hooks.contract import layout
from supervise_hooks.contract.manifest import Manifest
from supervise_hooks.contract.verification import Depth, Inspection

_NOT_CHECKPOINTS = frozenset({layout.SET_ASIDE, layout.LAST, layout.BEST})
"""`last` and `best` are hints: what they point at is judged under its own name."""


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
    """Every checkpoint directly in `folder`, ours or of another format, newest first. Raises OSError when it cannot be listed.

    One level only, however deep the junk. Hidden names and names that are not UTF-8 are nobody's checkpoints.
    """
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if _may_be_checkpoint(entry)]
    found = {str(path): checkpoint for path in paths if (checkpoint := look(path, depth, on_bytes)) is not None}
    return [found[candidate.path] for candidate in order([checkpoint.candidate for checkpoint in found.values()])]


def _may_be_checkpoint(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or entry.name in _NOT_CHECKPOINTS:
        return False
    try:
        entry.name.encode()
    except UnicodeEncodeError:
        return False
    return True


def look(path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Found | None:
    """One entry as a checkpoint; None when it is none."""
    form = recognise(path)
    if form is None:
        return None
    if form.name != SealedFormat.name:
        inspection = form.inspect(path, depth, on_bytes)
        state: State = "torn" if inspection.verdict == "TORN" else "unknown"
        candidate = Candidate(
            path=str(path), step=inspection.step, run_id=None, state=state, problems=inspection.problems, sealed_kind=False
        )
        return Found(path=path, candidate=candidate, inspection=inspection)
    inspection, manifest, unsealed = inspect_sealed(path, depth, on_bytes)
    if manifest is not None:
        candidate = Candidate(
            path=str(path),
            step=manifest.step,
            run_id=manifest.run_id,
            attempt=manifest.attempt,
            state="whole" if inspection.verdict == "WHOLE" else "torn",
            problems=inspection.problems,
            world_size=manifest.world_size,
        )
    else:
        assert unsealed is not None
        candidate = Candidate(
            path=str(path),
            step=inspection.step,
            run_id=unsealed.run_id,
            attempt=unsealed.attempt,
            state="torn" if has_manifest(path) else unsealed.state,
            problems=inspection.problems,
        )
    return Found(path=path, candidate=candidate, inspection=inspection, manifest=manifest)


def may_still_appear(found: Found) -> bool:
    """Whether a sealed one lacks nothing but a file: on network filesystems a peer's file may show up a little later.

    One never sealed is not waited for: that is what a save cut short by a kill leaves, on any filesystem.
    """
    missing = [problem.endswith(" is missing") for problem in found.inspection.problems]
    return found.candidate.state == "torn" and found.manifest is not None and any(missing)
