"""Our own format: a folder of rank files with a manifest written last. Verification itself is in the contract, for both sides."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core.resume import State
from supervise_hooks.contract import layout
from supervise_hooks.contract.identity import ProcessIdentity, is_alive
from supervise_hooks.contract.manifest import Receipt
from supervise_hooks.contract.verification import Depth, Inspection, verify_sealed

FOREIGN_WRITER_S = 600.0
"""A writing mark of another host, whose processes we cannot see, counts as alive for so long after its last change."""


class SealedFormat:
    """`step-000001234/`, whole or not, or any folder with a manifest of ours."""

    name = "supervise-sealed"

    def recognises(self, path: Path) -> bool:
        """By the folder's name, or by a manifest in it."""
        return path.is_dir() and (layout.parse_step(path.name) is not None or os.path.lexists(path / layout.MANIFEST))

    def inspect(self, path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Inspection:
        """The verdict."""
        inspection, manifest = verify_sealed(path, depth, on_bytes)
        if manifest is None and not os.path.lexists(path / layout.MANIFEST):
            _, _, _, problems = writer_state(path)
            return msgspec.structs.replace(inspection, problems=problems)
        return inspection


class _Mark(msgspec.Struct):
    """What a `.writing` mark says; unknown fields are ignored."""

    writer: ProcessIdentity
    run_id: str | None = None
    attempt: int = 0


def writer_state(path: Path, now: float | None = None) -> tuple[State, str | None, int, tuple[str, ...]]:
    """Of a folder without manifest: (writing | unfinished, run id, attempt, problems). Being written is not the same as broken."""
    run_id, attempt, receipts, live = None, 0, 0, []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(path))
    worlds = set()
    for name in names:
        parsed = layout.parse_rank_file(name)
        if parsed is None:
            continue
        worlds.add(parsed[1])
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if parsed[2] == "receipt.json":
                receipt = msgspec.json.decode((path / name).read_bytes(), type=Receipt)
                run_id, attempt, receipts = receipt.run_id, max(attempt, receipt.attempt), receipts + 1
            elif parsed[2] == "writing":
                mark = msgspec.json.decode((path / name).read_bytes(), type=_Mark)
                run_id, attempt = mark.run_id or run_id, max(attempt, mark.attempt)
                if _is_writing(path / name, mark.writer, time.time() if now is None else now):
                    live.append(parsed[0])
    if live:
        return "writing", run_id, attempt, (f"it is being written by rank {', '.join(map(str, live))}",)
    world = max(worlds, default=0)
    what = f"{receipts} of {world} ranks finished writing" if world else "it holds nothing of ours"
    return "unfinished", run_id, attempt, (f"not sealed: {what}",)


def _is_writing(mark: Path, writer: ProcessIdentity, now: float) -> bool:
    if writer.host == os.uname().nodename:
        return is_alive(writer)
    return now - mark.stat().st_mtime < FOREIGN_WRITER_S
