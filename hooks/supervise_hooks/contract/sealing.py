"""Sealing: all receipts are in -> one manifest. Idempotent; anyone may do it, and doing it twice is harmless.

Sealed by the last rank to write its receipt, by the daemon, or by the next start: whoever sees all receipts first.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path

from supervise_hooks.contract import durable, layout
from supervise_hooks.contract.errors import CheckpointError, ContractError
from supervise_hooks.contract.manifest import Manifest, Receipt, encode, read_manifest, read_receipt


def seal(folder: Path, *, now: float | None = None) -> tuple[Manifest | None, str]:
    """Write the manifest if every rank's receipt of one attempt is there and every file has its size.

    Returns (manifest, reason); manifest None: not sealed, and the reason says what is missing. An existing manifest is
    returned untouched, a damaged one left alone. Raises CheckpointError when the disk refuses.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            return read_manifest(folder), "already sealed"
        receipts, reason = _collect(folder)
        if receipts is None:
            return None, reason
        manifest = join(receipts, time.time() if now is None else now)
        for entry in manifest.files:
            size = os.stat(folder / entry.path, follow_symlinks=False).st_size
            if size != entry.size:
                return None, f"{entry.path} has {size} bytes, its receipt says {entry.size}"
        durable.write(folder / layout.MANIFEST, encode(manifest))
    except FileNotFoundError as error:
        return None, f"{error.filename} is missing"
    except ContractError as error:
        return None, str(error)
    except OSError as error:
        raise CheckpointError(f"cannot seal {folder}: {error.strerror}") from error
    durable.sync_folder(folder.parent)  # the checkpoint's own name
    return manifest, f"sealed with {len(receipts)} receipts"


def _collect(folder: Path) -> tuple[list[Receipt] | None, str]:
    """Receipts of the newest attempt that has any, if complete."""
    receipts: list[Receipt] = []
    unusable: dict[int, ContractError] = {}
    for name in sorted(os.listdir(folder)):
        parsed = layout.parse_rank_file(name)
        if parsed and parsed[2] == "receipt.json":
            try:
                receipts.append(read_receipt(folder, parsed[0], parsed[1]))
            except ContractError as error:
                unusable[parsed[1]] = error
    if not receipts:
        return None, str(next(iter(unusable.values()), "no rank has written a receipt"))
    # Debris of a killed save may lie beside: only receipts of one attempt and one world belong together.
    newest = max(receipts, key=lambda receipt: receipt.attempt)
    if newest.world_size in unusable:  # of another world it is debris; of this one it may be of a newer attempt
        return None, str(unusable[newest.world_size])
    same = [r for r in receipts if (r.run_id, r.attempt, r.world_size) == (newest.run_id, newest.attempt, newest.world_size)]
    there = {r.rank for r in same}
    missing = list(itertools.islice((rank for rank in range(newest.world_size) if rank not in there), 9))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        count = newest.world_size - len(there)
        return None, f"{count} of {newest.world_size} receipts of attempt {newest.attempt} are missing: rank {shown}"
    return same, "complete"


def join(receipts: list[Receipt], sealed_at: float) -> Manifest:
    """One manifest from all receipts. Raises ContractError when they do not belong to one save."""
    first = min(receipts, key=lambda receipt: receipt.rank)
    if {(r.run_id, r.attempt, r.step, r.world_size) for r in receipts} != {
        (first.run_id, first.attempt, first.step, first.world_size)
    }:
        raise ContractError("cannot join receipts: they are of different runs, attempts, steps or world sizes")
    if len({r.replicated for r in receipts}) > 1:
        raise ContractError(
            "cannot join receipts: the ranks hold different plain tensors (pipeline or expert parallelism, FSDP1?), so some were written "
            "by nobody; shard such models with DTensor, or attach what is a rank's own as `objects`"
        )
    return Manifest(
        run_id=first.run_id,
        attempt=first.attempt,
        step=first.step,
        world_size=first.world_size,
        reason=first.reason,
        files=tuple(entry for r in sorted(receipts, key=lambda r: r.rank) for entry in r.files),
        sealed_at=sealed_at,
        metric=first.metric,
        epoch=first.epoch,
    )
