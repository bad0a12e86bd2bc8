"""The two records of a sealed checkpoint: a receipt for each rank, one manifest over all.

Only their JSON form is the contract; unknown fields of newer versions are ignored on reading.
"""

import io
import os
import stat
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from supervise_hooks.contract import durable, layout
from supervise_hooks.contract.errors import ContractError

SCHEMA = 1
FORMAT = "supervise-sealed"
MAX_RECORD_BYTES = 256 << 20
"""A larger record is refused unread: a manifest is about 150 bytes a file."""

Reason = Literal["periodic", "emergency", "snapshot", "final", "requested", "external"]


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    path: str
    size: int
    """Bytes."""
    xxh3_128: str
    """Hex digest of the content, computed while the bytes were still in memory."""


class Metric(msgspec.Struct, frozen=True):
    """The number by which `best` is chosen."""

    name: str
    value: float
    mode: Literal["min", "max"]


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of one checkpoint."""

    schema: int = SCHEMA
    run_id: str
    attempt: int
    step: int
    rank: int
    world_size: int
    reason: Reason
    files: tuple[FileEntry, ...]
    metric: Metric | None = None
    epoch: int | None = None
    replicated: str = ""
    """Digest of the names and shapes this rank takes to be the same on all ranks; empty: it takes none so."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All receipts of one checkpoint. Written last: its presence is the commit."""

    schema: int = SCHEMA
    format: str = FORMAT
    run_id: str
    attempt: int
    step: int
    world_size: int
    reason: Reason
    files: tuple[FileEntry, ...]
    sealed_at: float
    """Wall time, seconds since 1970: for people, never for decisions."""
    metric: Metric | None = None
    epoch: int | None = None

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)


def encode(record: msgspec.Struct) -> bytes:
    """Indented JSON, one trailing newline: people read these files."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def open_regular(path: Path) -> io.FileIO:
    """A regular file opened for reading, unbuffered. Raises FileNotFoundError, ContractError (link, pipe, folder, no access)."""
    try:
        # NOFOLLOW: a link may lead out of the checkpoint. NONBLOCK: a FIFO must not hang the reader.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ContractError(f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ContractError(f"cannot read {path}: not a regular file")
    return io.FileIO(fd, "rb")


RecordT = TypeVar("RecordT", Receipt, Manifest)


def _decode(path: Path, kind: type[RecordT]) -> RecordT:
    """Read one record with a bound on its size: it may come from a stranger's folder."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_RECORD_BYTES:
            raise ContractError(f"cannot read {path}: {size} bytes is too large for a {kind.__name__.lower()}")
        content = file.read()
    try:
        record = msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"cannot read {path}: not a {kind.__name__.lower()}: {error}") from None
    if record.schema > SCHEMA:
        raise ContractError(f"cannot read {path}: schema {record.schema} is newer than this version knows ({SCHEMA})")
    return record


def read_receipt(folder: Path, rank: int, world_size: int) -> Receipt:
    """Read and check one rank's receipt. Raises FileNotFoundError, ContractError."""
    path = folder / layout.receipt_name(rank, world_size)
    receipt = _decode(path, Receipt)
    if (receipt.rank, receipt.world_size) != (rank, world_size) or not 0 <= rank < world_size:
        raise ContractError(f"cannot use {path}: it is of rank {receipt.rank} of {receipt.world_size}")
    _check(receipt, f"cannot use {path}")
    return receipt


def read_manifest(folder: Path) -> Manifest:
    """Read and check a checkpoint's manifest. Raises FileNotFoundError (not sealed), ContractError (not usable)."""
    manifest = _decode(folder / layout.MANIFEST, Manifest)
    _check(manifest, f"cannot use manifest of {folder}")
    return manifest


def _check(record: Receipt | Manifest, problem: str) -> None:
    """Refuse what would lead out of the checkpoint, before anything acts on it."""
    unsafe = next((entry.path for entry in record.files if not layout.is_safe_relative(entry.path)), None)
    if unsafe is not None:
        raise ContractError(f"{problem}: it names files outside the checkpoint: {unsafe[:80]!r}")
    if record.step < 0 or record.world_size < 1 or any(entry.size < 0 for entry in record.files):
        raise ContractError(f"{problem}: negative step, size or world size")


def write_receipt(folder: Path, receipt: Receipt) -> None:
    """Durably write a rank's receipt. Raises OSError."""
    durable.write(folder / layout.receipt_name(receipt.rank, receipt.world_size), encode(receipt))
