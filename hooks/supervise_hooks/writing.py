"""Writing one rank's part of a checkpoint to disk: tensor file, state file, receipt. No torch: bytes come in, a receipt goes out.

Digests are computed while the bytes are still in memory. Whatever fails, this rank's own files are gone again and
every older checkpoint is untouched.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from supervise_hooks.contract import digests, durable, layout, tensors
from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.contract.identity import ProcessIdentity, identify
from supervise_hooks.contract.manifest import FileEntry, Receipt, write_receipt
from supervise_hooks.state import SaveContext

_SLICE = 8 << 20
"""Bytes digested and then written: small enough that the write finds them in the cache."""
_MARGIN_BYTES = 1 << 20
_FILES = 4


class Part(msgspec.Struct, frozen=True):
    """One tensor, or one piece of one, as it goes into the file."""

    key: str
    dtype: str
    """safetensors name, e.g. F32."""
    shape: tuple[int, ...]
    size: int
    """Bytes."""
    read: Callable[[], memoryview]
    """Called once, when its turn comes: of tensors on a device only one at a time is copied to the host."""
    piece: tensors.Piece | None = None


class Mark(msgspec.Struct, frozen=True):
    """Content of the `.writing` mark: who is writing here."""

    writer: ProcessIdentity
    run_id: str
    attempt: int


def write_rank(folder: Path, context: SaveContext, parts: Sequence[Part], state: bytes, replicated: str = "") -> Receipt:
    """Durably write a rank's files and then its receipt. Raises CheckpointError."""
    rank, world = context.rank, context.world_size
    try:
        durable.make_folder(folder)
        try:
            check_space(folder, context.step, sum(part.size for part in parts) + len(state))
        except CheckpointError:
            with contextlib.suppress(OSError):  # not empty: other ranks write here
                folder.rmdir()
            raise
        mark = folder / layout.writing_name(rank, world)
        if mark.exists():
            _remove_temporaries(folder, rank, world)
        # Not durable on purpose: it speaks of a live process only.
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with contextlib.closing(os.fdopen(fd, "wb", buffering=0)) as file:
            file.write(msgspec.json.encode(Mark(identify(), context.run_id, context.attempt)))
        try:
            return _write_files(folder, context, parts, state, replicated)
        except BaseException:
            _remove_own(folder, rank, world)
            raise
        finally:
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot save step {context.step} to {folder}: {error.strerror}") from error


def _write_files(folder: Path, context: SaveContext, parts: Sequence[Part], state: bytes, replicated: str) -> Receipt:
    rank, world = context.rank, context.world_size
    old_receipt = folder / layout.receipt_name(rank, world)
    if old_receipt.exists():  # of a killed earlier attempt: it must not vouch for what is written now
        old_receipt.unlink()
        durable.sync_folder(folder)
    entries = [_write_tensors(folder / layout.tensors_name(rank, world), parts)]
    durable.write(folder / layout.state_name(rank, world), state)
    entries.append(FileEntry(layout.state_name(rank, world), len(state), digests.digest_buffers([state])))
    receipt = Receipt(
        run_id=context.run_id,
        attempt=context.attempt,
        step=context.step,
        rank=rank,
        world_size=world,
        reason=context.reason,
        files=tuple(entries),
        metric=context.metric,
        epoch=context.epoch,
        replicated=replicated,
    )
    write_receipt(folder, receipt)
    return receipt


def _write_tensors(path: Path, parts: Sequence[Part]) -> FileEntry:
    # Wide types first, so that every tensor lies aligned for its type.
    ordered = sorted(parts, key=lambda part: (-tensors.DTYPE_BITS.get(part.dtype, 8), part.key))
    entries: dict[str, tensors.Entry] = {}
    position = 0
    for part in ordered:
        entries[part.key] = tensors.Entry(part.dtype, part.shape, (position, position + part.size))
        position += part.size
    header = tensors.encode_header(entries, {part.key: part.piece for part in ordered if part.piece is not None})
    size = len(header) + position
    digest = xxhash.xxh3_128()
    with durable.replacing(path) as fd:
        allocate(fd, size)
        for read in ((lambda: memoryview(header)), *(part.read for part in ordered)):
            buffer = read()
            for start in range(0, buffer.nbytes, _SLICE):
                piece = buffer[start : start + _SLICE]
                digest.update(piece)
                durable.write_all(fd, piece)
    return FileEntry(path.name, size, digest.hexdigest())


def allocate(fd: int, size: int) -> None:
    """Reserve the file's blocks at once: faster, and a full disk is found before the first byte. Raises OSError."""
    if size == 0:
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def check_space(folder: Path, step: int, size: int) -> None:
    """Raise CheckpointError when the filesystem has no room for `size` bytes in a few files."""
    info = os.statvfs(folder)
    free = info.f_bavail * info.f_frsize
    if free < size + _MARGIN_BYTES:
        raise CheckpointError(
            f"cannot save step {step} to {folder}: it needs {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
        )
    if info.f_files and info.f_favail < _FILES:
        raise CheckpointError(f"cannot save step {step} to {folder}: no inodes are free")


def _remove_temporaries(folder: Path, rank: int, world: int) -> None:
    """Take away what a writer that was killed left under temporary names: it may be as large as the checkpoint."""
    for name in os.listdir(folder):
        if name.startswith(f"{durable.TEMP_PREFIX}{layout.rank_stem(rank, world)}."):
            (folder / name).unlink(missing_ok=True)


def _remove_own(folder: Path, rank: int, world: int) -> None:
    """Take away what this rank wrote; a folder left empty goes too. Best effort: the error that led here matters more."""
    with contextlib.suppress(OSError):
        for name in (
            layout.receipt_name(rank, world),
            layout.tensors_name(rank, world),
            layout.state_name(rank, world),
            layout.writing_name(rank, world),
        ):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
