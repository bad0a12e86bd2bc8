"""A single safetensors file: its header must cover the file exactly. It carries no checksum."""

from collections.abc import Callable
from pathlib import Path

from supervise_daemon.formats.naming import step_in_name
from supervise_hooks.contract.digests import CHUNK
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.tensors import read_header
from supervise_hooks.contract.verification import Depth, Inspection


class SafetensorsFormat:
    """`*.safetensors`."""

    name = "safetensors"

    def recognises(self, path: Path) -> bool:
        """By its ending."""
        return path.suffix == ".safetensors" and path.is_file()

    def inspect(self, path: Path, depth: Depth, on_bytes: Callable[[int], None] | None = None) -> Inspection:
        """Whole when the header describes every byte, and on full when every byte can be read; flipped bits cannot be seen."""
        problems: tuple[str, ...] = ()
        try:
            read_header(path)
            if depth == "full":
                _read_through(path, on_bytes)
        except ContractError as error:
            problems = (str(error),)
        except OSError as error:
            problems = (f"{path.name} cannot be read: {error.strerror}",)
        return Inspection(
            path=str(path),
            format=self.name,
            step=step_in_name(path.name),
            verdict="TORN" if problems else "WHOLE",
            depth=depth,
            problems=problems,
            caveats=("no checksum in this file: changed bytes in tensor data cannot be seen",),
        )


def _read_through(path: Path, on_bytes: Callable[[int], None] | None) -> None:
    """A disk that cannot give the bytes back says so only when asked for them."""
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            if on_bytes is not None:
                on_bytes(count)
