"""Built-in checkpoint formats, in the order in which they are asked: name -> where its class is. Imported on first use."""

import functools
import importlib
from pathlib import Path

from supervise_daemon.ports import Format

FORMATS = {
    "supervise-sealed": "supervise_daemon.formats.sealed:SealedFormat",
    "safetensors": "supervise_daemon.formats.safetensors_file:SafetensorsFormat",
    "torch.save": "supervise_daemon.formats.torch_file:TorchFileFormat",
}


@functools.cache
def formats() -> tuple[Format, ...]:
    """One of each."""
    return tuple(_load(where) for where in FORMATS.values())


def _load(where: str) -> Format:
    module, _, name = where.partition(":")
    form: Format = getattr(importlib.import_module(module), name)()
    return form


def recognise(path: Path) -> Format | None:
    """The format of `path`, or None when it does not look like a checkpoint at all, or cannot even be looked at."""
    try:
        return next((form for form in formats() if form.recognises(path)), None)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
