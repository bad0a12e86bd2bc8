"""Sealed checkpoints for tests, made without torch: the layout of the contract, one small tensor split over the ranks."""

import struct
from pathlib import Path

import msgspec

from supervise_hooks.contract import digests, layout, tensors
from supervise_hooks.contract.identity import ProcessIdentity
from supervise_hooks.contract.manifest import FileEntry, Manifest, Metric, Reason, Receipt, write_receipt
from supervise_hooks.contract.sealing import seal

ROWS = 64
"""Float32 elements each rank holds."""
RUN = "run-1"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of checkpoint to make."""

    run_id: str = RUN
    attempt: int = 1
    world_size: int = 2
    reason: Reason = "periodic"
    metric: Metric | None = None
    sealed_at: float = 0.0
    name: str | None = None
    """Default: the step's own name."""


def a_checkpoint(base: Path, step: int, saved: Saved | None = None) -> Path:
    """A whole checkpoint of `step` in `base`."""
    saved = saved or Saved()
    folder = parts(base, step, range(saved.world_size), saved)
    manifest, why = seal(folder, now=saved.sealed_at)
    assert manifest is not None, why
    return folder


def parts(base: Path, step: int, ranks: range, saved: Saved | None = None) -> Path:
    """What the given ranks write of a checkpoint, receipts included; never sealed."""
    saved = saved or Saved()
    folder = base / (saved.name or layout.step_name(step))
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        write_rank(folder, step, rank, saved)
    return folder


def write_rank(folder: Path, step: int, rank: int, saved: Saved) -> None:
    """One rank's files and its receipt."""
    contents = {
        layout.tensors_name(rank, saved.world_size): tensor_bytes(step, rank, saved.world_size),
        layout.state_name(rank, saved.world_size): msgspec.json.encode({"step": step, "rank": rank}),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    files = tuple(FileEntry(name, len(content), digests.digest_buffers([content])) for name, content in contents.items())
    receipt = Receipt(
        run_id=saved.run_id,
        attempt=saved.attempt,
        step=step,
        rank=rank,
        world_size=saved.world_size,
        reason=saved.reason,
        files=files,
        metric=saved.metric,
    )
    write_receipt(folder, receipt)


def tensor_bytes(step: int, rank: int, world_size: int) -> bytes:
    """A safetensors file with this rank's rows of one tensor."""
    data = struct.pack(f"<{ROWS}f", *(float(step + rank + index + 1) for index in range(ROWS)))
    entry = tensors.Entry("F32", (ROWS,), (0, len(data)))
    piece = tensors.Piece("model.w", (ROWS * world_size,), (ROWS * rank,))
    return tensors.encode_header({"model.w": entry}, {"model.w": piece}) + data


def mark_writing(folder: Path, rank: int, world_size: int, writer: ProcessIdentity, run_id: str = RUN) -> Path:
    """The mark of a rank that is writing into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / layout.writing_name(rank, world_size)
    mark.write_bytes(msgspec.json.encode({"writer": writer, "run_id": run_id, "attempt": 1}))
    return mark


def payload(folder: Path, rank: int = 0, world_size: int = 2) -> Path:
    """A rank's tensor file."""
    return folder / layout.tensors_name(rank, world_size)


def edit_manifest(folder: Path, **changes: object) -> None:
    """Write a manifest that says something else, as a stranger could."""
    path = folder / layout.MANIFEST
    raw = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(raw | changes))


def read(folder: Path) -> Manifest:
    """The manifest as it is."""
    return msgspec.json.decode((folder / layout.MANIFEST).read_bytes(), type=Manifest)
