"""Files of `torch.save`: a zip whose directory is at the end, or the legacy pickle stream. Never unpickled.

torch.load does not check the zip's CRCs (2.13): a full inspection does.
"""

import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from supervise_daemon.formats.naming import step_in_name
from supervise_hooks.contract.verification import Depth, Inspection, Verdict

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK = 1 << 20


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
            verdict, problems, caveats = "TORN", [f"{path.name} cannot be read: {error.strerror}"], []
        return Inspection(
            path=str(path),
            format=self.name,
            step=step_in_name(path.name),
            verdict=verdict,
            depth=depth,
            problems=tuple(problems),
            caveats=tuple(caveats),
        )


def _legacy(path: Path, head: bytes) -> tuple[Verdict, list[str], list[str]]:
    size = path.stat().st_size
    if size == 0:
        return "TORN", [f"{path.name} is empty"], []
    if not any(head):
        return "TORN", [f"{path.name} begins with zeros: it is neither a zip nor a pickle"], []
    return "UNKNOWN", [], [f"{path.name} ({size} bytes) is no zip: a legacy pickle carries nothing to prove it with"]


def _zip(path: Path, depth: Depth, on_bytes: Callable[[int], None] | None) -> tuple[Verdict, list[str], list[str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            problems = [] if any(record.filename.endswith("data.pkl") for record in records) else [f"{path.name} holds no data.pkl"]
            if depth == "full":
                problems += [problem for record in records if (problem := _crc(archive, record, on_bytes))]
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        return "TORN", [f"{path.name} has no usable zip directory ({error}): it was cut off or overwritten"], []
    caveats = [] if depth == "full" else ["checksums were not read (quick): changed bytes would not be seen"]
    return ("TORN" if problems else "WHOLE"), problems, caveats


def _crc(archive: zipfile.ZipFile, record: zipfile.ZipInfo, on_bytes: Callable[[int], None] | None) -> str | None:
    try:
        with archive.open(record) as stream:
            while chunk := stream.read(_CHUNK):
                if on_bytes is not None:
                    on_bytes(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        return f"record {record.filename}: {error}"
    return None
