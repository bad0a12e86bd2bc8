"""Our own format: a folder of rank files with a manifest written last. Verification itself is in the contract, for both sides.

Also tells, of a folder without manifest, whether somebody is writing it now or its writer is gone, and whose it is.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core.resume import State
from supervise_hooks.contract import layout
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.identity import ProcessIdentity, is_alive
from supervise_hooks.contract.manifest import FORMAT, Manifest, open_regular, read_receipt
from supervise_hooks.contract.verification import Depth, Inspection, verify_sealed

FOREIGN_WRITER_S = 600.0
"""A writing mark of another host, whose processes we cannot see, counts as alive for so long after its last change."""
_MAX_MARK_BYTES = 4096
_SHOWN = 8


class Unsealed(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder without a usable manifest says of itself."""

    state: State
    """`writing` while a writer lives, else `unfinished`: being written is not the same as broken."""
    run_id: str | None
    """None: no receipt or mark says whose it is."""
    attempt: int
    problem: str


class SealedFormat:
    """`step-000001234/`, whole or not, or any folder with a manifest of ours."""

    name = FORMAT

    def recognises(self, path: Path) -> bool:
        """By the folder's name, or by a manifest in it."""
        return path.is_dir() and (layout.parse_step(path.name) is not None or os.path.lexists(path / layout.MANIFEST))

    def inspect(self, path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Inspection:
        """The verdict."""
        return inspect_sealed(path, depth, on_bytes)[0]


def inspect_sealed(
    path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None
) -> tuple[Inspection, Manifest | None, Unsealed | None]:
    """The verdict; with it the manifest if it is usable, else what the folder says of itself."""
    inspection, manifest = verify_sealed(path, depth, on_bytes)
    if manifest is not None:
        return inspection, manifest, None
    unsealed = read_unsealed(path, time.time())
    if not has_manifest(path):
        inspection = msgspec.structs.replace(inspection, problems=(unsealed.problem,))
    return inspection, None, unsealed


def has_manifest(path: Path) -> bool:
    """Whether something bears the manifest's name, usable or not; also when the folder cannot be entered."""
    try:
        os.lstat(path / layout.MANIFEST)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


class _Mark(msgspec.Struct):
    """What a `.writing` mark says; unknown fields are ignored."""

    writer: ProcessIdentity
    run_id: str | None = None
    attempt: int = 0


def read_unsealed(path: Path, now: float) -> Unsealed:
    """Whose an unsealed folder is and whether it is being written. `now` is wall time: marks of other hosts only have that."""
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return Unsealed(state="unfinished", run_id=None, attempt=0, problem=f"it cannot be read: {error.strerror}")
    owners: list[tuple[int, str]] = []
    worlds: set[int] = set()
    writers: list[int] = []
    receipts = 0
    for name in names:
        parsed = layout.parse_rank_file(name)
        if parsed is None:
            continue
        rank, world, kind = parsed
        worlds.add(world)
        if kind == "receipt.json":
            with contextlib.suppress(ContractError, OSError):  # an unreadable receipt counts as none
                receipt = read_receipt(path, rank, world)
                owners.append((receipt.attempt, receipt.run_id))
                receipts += 1
        elif kind == "writing":
            mark, changed_at = _read_mark(path / name)
            if mark is not None and mark.run_id is not None:
                owners.append((mark.attempt, mark.run_id))
            if _is_writing(mark, changed_at, now):
                writers.append(rank)
    attempt, run_id = max(owners, default=(0, None))
    if writers:
        shown = ", ".join(map(str, writers[:_SHOWN])) + (", …" if len(writers) > _SHOWN else "")
        return Unsealed(
            state="writing", run_id=run_id, attempt=attempt, problem=f"not sealed: it is being written by rank {shown}"
        )
    what = f"{receipts} of {max(worlds)} ranks finished writing" if worlds else "no rank wrote anything of ours into it"
    return Unsealed(state="unfinished", run_id=run_id, attempt=attempt, problem=f"not sealed: {what}, and no writer is left")


def _read_mark(path: Path) -> tuple[_Mark | None, float | None]:
    """(content, wall time of its last change); (None, …) for one cut off, (None, None) for one that is gone or no file."""
    try:
        with open_regular(path) as file:
            changed_at = os.fstat(file.fileno()).st_mtime
            content = file.read(_MAX_MARK_BYTES)
    except (ContractError, OSError):
        return None, None  # removed meanwhile, its rank has just finished; or no mark at all
    try:
        return msgspec.json.decode(content, type=_Mark), changed_at
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, changed_at


def _is_writing(mark: _Mark | None, changed_at: float | None, now: float) -> bool:
    if mark is not None and mark.writer.host == os.uname().nodename:
        return is_alive(mark.writer)
    # Of another host, or created but not filled yet: only its age can tell.
    return changed_at is not None and abs(now - changed_at) < FOREIGN_WRITER_S
