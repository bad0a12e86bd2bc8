"""Files of `torch.save`: a zip whose directory is at the end, or the legacy pickle stream. Never unpickled.

torch.load does not check the zip's CRCs (2.13): a full inspection does. Records are stored, never compressed.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from supervise_daemon.formats.naming import step_in_name
from supervise_hooks.contract.verification import Depth, Inspection, Verdict

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK = 1 << 20
_END_BYTES = 22
"""The zip's last record, when no comment follows it: torch writes none."""
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, IndexError)
"""What zipfile (3.11) raises for damaged archives; RuntimeError is for encrypted ones."""

_Found = tuple[Verdict, list[str], list[str]]


class TorchFileFormat:
    """`*.pt`, `*.pth`, `*.ckpt`, `*.bin`."""

    name = "torch.save"

    def recognises(self, path: Path) -> bool:
        """By its ending."""
        return path.suffix in _SUFFIXES and path.is_file()

    def inspect(self, path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Inspection:
        """Zip: directory on quick, every CRC on full. Legacy: nothing in the file could prove it."""
        try:
            with path.open("rb") as file:
                head = file.read(4)
            verdict, problems, caveats = _zip(path, depth, on_bytes) if head[:2] == b"PK" else _legacy(path, head)
        except OSError as error:
            verdict, problems, caveats = "TORN", [f"{path.name} cannot be read: {error.strerror or error}"], []
        return Inspection(
            path=str(path),
            format=self.name,
            step=step_in_name(path.name),
            verdict=verdict,
            depth=depth,
            problems=tuple(problems),
            caveats=tuple(caveats),
        )


def _legacy(path: Path, head: bytes) -> _Found:
    size = path.stat().st_size
    if size == 0:
        return "TORN", [f"{path.name} is empty"], []
    if not any(head):
        return "TORN", [f"{path.name} begins with zeros: it is neither a zip nor a pickle"], []
    what = "a legacy pickle, which carries nothing to prove it with and is never unpickled here"
    seen = what if head[:1] == b"\x80" else f"neither a zip nor a pickle, it begins with {head.hex()}"
    return "UNKNOWN", [], [f"{path.name} ({size} bytes) is {seen}"]


def _zip(path: Path, depth: Depth, on_bytes: Callable[[int], None] | None) -> _Found:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if not any(record.filename.endswith("data.pkl") for record in records):
                return "UNKNOWN", [], [f"{path.name} is a zip without data.pkl: torch.save did not write it"]
            problems = _layout_problems(path, archive)
            unchecked = all(record.CRC == 0 for record in records)
            if depth == "full" and not problems:
                problems += [text for record in records if (text := _content_problem(archive, record, unchecked, on_bytes))]
    except _BROKEN as error:
        return "TORN", [f"{path.name} has no usable zip directory ({error}): it was cut off or overwritten"], []
    return ("TORN" if problems else "WHOLE"), problems, _caveats(depth, unchecked)


def _caveats(depth: Depth, unchecked: bool) -> list[str]:
    if unchecked:
        return ["saved without checksums (set_crc32_options(False)): changed bytes cannot be seen"]
    return [] if depth == "full" else ["checksums were not read (quick): changed bytes would not be seen"]


def _layout_problems(path: Path, archive: zipfile.ZipFile) -> list[str]:
    """What the directory alone shows, without reading the records."""
    records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        return [f"{path.name} holds compressed records: torch.save writes none, and unpacking them could take for ever"]
    if sum(record.compress_size for record in records) > archive.start_dir:
        return [f"{path.name} lists more bytes than it has: its records overlap"]
    with path.open("rb") as file:
        file.seek(-_END_BYTES, 2)
        if file.read(4) != b"PK\x05\x06":
            return [f"{path.name} does not end where its zip ends: something was appended, or its end overwritten"]
    return []


def _content_problem(
    archive: zipfile.ZipFile, record: zipfile.ZipInfo, unchecked: bool, on_bytes: Callable[[int], None] | None
) -> str | None:
    """Read one record through; zipfile compares its CRC at the end."""
    if unchecked:
        del record.CRC  # zipfile then reads without comparing: every CRC in such a file is 0
    try:
        with archive.open(record) as stream:
            count = 0
            while chunk := stream.read(_CHUNK):
                count += len(chunk)
                if on_bytes is not None:
                    on_bytes(len(chunk))
    except (*_BROKEN, OSError) as error:
        return f"record {record.filename}: {error}"
    return None if count == record.file_size else f"record {record.filename}: {count} of {record.file_size} bytes are there"
