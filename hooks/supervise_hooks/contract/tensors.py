"""The tensor files of a checkpoint: safetensors layout, plus where each piece lies in its whole tensor.

safetensors: 8 bytes little-endian header length, a JSON header, then the data; offsets are relative to the data.
Ours carry `__metadata__["supervise"]`: JSON of `Piece` by key, for tensors split over ranks. Nothing is unpickled.
"""

import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from supervise_hooks.contract.errors import ContractError

METADATA_KEY = "supervise"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

MAX_DIMENSIONS = 64
"""torch's own limit. Without one, a hostile shape costs quadratic time in the product below."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "C128": 128,
}  # fmt: skip
"""Bits an element, by safetensors dtype name (C128 is ours: the library has none)."""


class Entry(msgspec.Struct, frozen=True):
    """One tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Piece(msgspec.Struct, frozen=True):
    """Which part of which tensor an entry holds. Entries without a piece are whole tensors of their own."""

    name: str
    """Name of the whole tensor, e.g. `model.layers.0.weight`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Where this part begins; its own shape is the entry's."""


class Header(msgspec.Struct, frozen=True):
    """A parsed and checked header."""

    entries: dict[str, Entry]
    pieces: dict[str, Piece]
    data_start: int
    """File position of the first data byte."""


def encode_header(entries: dict[str, Entry], pieces: dict[str, Piece]) -> bytes:
    """Length prefix and header, padded with spaces so that data starts on an 8-byte boundary."""
    body = msgspec.json.encode(
        {"__metadata__": {METADATA_KEY: msgspec.json.encode(pieces).decode(), "format": "pt"}} | dict(entries)
    )
    body += b" " * (-len(body) % 8)
    return struct.pack("<Q", len(body)) + body


def read_header(path: str | os.PathLike[str]) -> Header:
    """Parse a file's header and check that its offsets cover the file exactly. Raises OSError, ContractError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ContractError(f"{Path(path).name} is {size} bytes, too short for a header")
        length = struct.unpack("<Q", prefix)[0]
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ContractError(f"{Path(path).name} has a broken header: its length {length} is beyond the file ({size} bytes)")
        body = file.read(length)
    return parse_header(body, size, Path(path).name)


def parse_header(body: bytes, file_size: int, name: str) -> Header:
    """Check a header's JSON against the size of its file. Raises ContractError naming `name`."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {key: msgspec.json.decode(value, type=Entry) for key, value in raw.items()}
        pieces = msgspec.json.decode(metadata.get(METADATA_KEY, "{}"), type=dict[str, Piece])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"{name} has a broken header: {error}") from None
    data_start = 8 + len(body)
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        bits = DTYPE_BITS.get(entry.dtype)
        if len(entry.shape) > MAX_DIMENSIONS:
            raise ContractError(f"{name} has a broken header: {key} has {len(entry.shape)} dimensions")
        if bits is not None and (min(entry.shape, default=0) < 0 or (end - begin) * 8 != bits * math.prod(entry.shape)):
            raise ContractError(f"{name} has a broken header: {key} does not have the bytes of its shape")
        if begin != position or end < begin:
            raise ContractError(f"{name} has a broken header: a gap or overlap before {key}")
        position = end
    if data_start + position != file_size:
        raise ContractError(f"{name} is {file_size} bytes, its header describes {data_start + position}")
    return Header(entries, pieces, data_start)


def check_coverage(headers: Iterable[Header]) -> list[str]:
    """Whether the pieces of all ranks tile every tensor they are parts of; a problem for each that is not covered.

    Volume and bounds are compared, and exact duplicates are counted once: pieces written by our planner never
    overlap in part.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    parts: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    problems: list[str] = []
    for header in headers:
        for key, piece in header.pieces.items():
            entry = header.entries.get(key)
            if entry is None:
                problems.append(f"{piece.name}: a piece is named but its data is missing")
                continue
            if shapes.setdefault(piece.name, piece.shape) != piece.shape:
                problems.append(f"{piece.name}: ranks disagree about its shape")
            if not (len(piece.shape) == len(piece.offset) == len(entry.shape)) or any(
                offset < 0 or offset + extent > whole
                for offset, extent, whole in zip(piece.offset, entry.shape, piece.shape, strict=True)
            ):
                problems.append(f"{piece.name}: a piece lies outside the tensor")
                continue
            parts.setdefault(piece.name, {})[piece.offset] = entry.shape
    for name, pieces in parts.items():
        covered = sum(math.prod(shape) for shape in pieces.values())
        whole = math.prod(shapes[name])
        if covered < whole:
            problems.append(f"{name}: {covered} of {whole} elements are there, the rest was never written")
        elif covered > whole:
            problems.append(f"{name}: pieces overlap ({covered} elements for {whole})")
    return problems
