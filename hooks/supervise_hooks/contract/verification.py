"""Proving a sealed checkpoint whole, without torch and without unpickling anything.

Shared by both sides: the daemon verifies before it chooses a resume point, a script alone does so for itself.
"""

import itertools
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from supervise_hooks.contract import digests, layout, tensors
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.manifest import FORMAT, FileEntry, Manifest, read_manifest

Depth = Literal["quick", "full"]
Verdict = Literal["WHOLE", "TORN", "UNKNOWN"]

_NAMED = 8
_ENOUGH = 1000
"""Problems after which no more files are looked at: the verdict is clear, and a hostile list must not cost minutes."""


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What verification says of one checkpoint. Field names are a promise (`verify --json`)."""

    path: str
    format: str
    step: int | None
    verdict: Verdict
    depth: Depth
    problems: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()
    """What nothing in this format could prove."""


def verify_sealed(
    folder: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None, threads: int = 4
) -> tuple[Inspection, Manifest | None]:
    """Inspect one sealed checkpoint. Quick: presence, sizes, headers, coverage. Full: also every digest.

    Never raises for what is on disk: everything found becomes a problem, in the user's words.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return _inspection(folder, layout.parse_step(folder.name), depth, ["not sealed: it has no manifest.json"]), None
    except (ContractError, OSError) as error:
        return _inspection(folder, layout.parse_step(folder.name), depth, [str(error)]), None
    problems = _ranks_missing(manifest)
    headers: list[tensors.Header] = []
    sound: list[FileEntry] = []
    for entry in manifest.files:
        if len(problems) >= _ENOUGH:
            problems.append(f"{_ENOUGH} problems were enough: the other files were not looked at")
            break
        problem = _presence(folder, entry)
        if problem is None and entry.path.endswith(".safetensors"):
            try:
                headers.append(tensors.read_header(folder / entry.path))
            except (ContractError, OSError) as error:
                problem = str(error)
        if problem is None:
            sound.append(entry)
        else:
            problems.append(problem)
    if not problems:  # with a file missing, what it held would be reported twice
        problems += tensors.check_coverage(headers)
    if depth == "full":
        with ThreadPoolExecutor(max(1, threads)) as pool:  # xxhash and read release the GIL
            problems += filter(None, pool.map(lambda entry: _digest(folder, entry, on_bytes), sound))
    return _inspection(folder, manifest.step, depth, problems), manifest


def _inspection(folder: Path, step: int | None, depth: Depth, problems: list[str]) -> Inspection:
    return Inspection(
        path=str(folder), format=FORMAT, step=step, verdict="TORN" if problems else "WHOLE", depth=depth, problems=tuple(problems)
    )


def _ranks_missing(manifest: Manifest) -> list[str]:
    """The world that saved is in the manifest; the world of whoever looks is of no concern."""
    ranks = {parsed[0] for entry in manifest.files if (parsed := layout.parse_rank_file(entry.path))}
    # A manifest made by `seal` over somebody else's files names no rank files at all.
    missing = (rank for rank in range(manifest.world_size) if rank not in ranks) if ranks else iter(())
    # A hostile world size must cost neither memory nor time: a few names, then a count.
    named = [f"rank {rank} of {manifest.world_size} has no files" for rank in itertools.islice(missing, _NAMED)]
    more = manifest.world_size - sum(rank < manifest.world_size for rank in ranks) - len(named) if ranks else 0
    return named + ([f"{more} more of {manifest.world_size} ranks have no files"] if more > 0 else [])


def _presence(folder: Path, entry: FileEntry) -> str | None:
    path = folder / entry.path
    # The file itself is looked at without following a link; nor may a folder on the way lead out of the checkpoint.
    # The checkpoint's own folder, the last of the parents, may be a link of the user's.
    if "/" in entry.path and any((folder / parent).is_symlink() for parent in Path(entry.path).parents[:-1]):
        return f"{entry.path} lies behind a link"
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return f"{entry.path} is missing"
    except OSError as error:
        return f"{entry.path} cannot be read: {error.strerror}"
    if not stat.S_ISREG(info.st_mode):
        return f"{entry.path} is not a regular file"
    if info.st_size != entry.size:
        return f"{entry.path} has {info.st_size} bytes, the manifest says {entry.size}"
    return None


def _digest(folder: Path, entry: FileEntry, on_bytes: Callable[[int], None] | None) -> str | None:
    try:
        digest = digests.digest_file(folder / entry.path, on_bytes)
    except OSError as error:
        return f"{entry.path} cannot be read: {error.strerror}"
    if digest != entry.xxh3_128:
        return f"{entry.path} has other content than was saved (XXH3 {digest}, the manifest says {entry.xxh3_128})"
    return None
