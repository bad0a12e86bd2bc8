"""Built-in checkpoint formats, in the order in which they are asked. Loaded when used."""

from pathlib import Path

from supervise_daemon.formats.safetensors_file import SafetensorsFormat
from supervise_daemon.formats.sealed import SealedFormat
from supervise_daemon.formats.torch_file import TorchFileFormat
from supervise_daemon.ports import Format

FORMATS: tuple[Format, ...] = (SealedFormat(), SafetensorsFormat(), TorchFileFormat())


def recognise(path: Path) -> Format | None:
    """The format of `path`, or None when it does not look like a checkpoint at all."""
    try:
        return next((form for form in FORMATS if form.recognises(path)), None)
    except OSError:
        return None  # unreadable: nothing is known of it
