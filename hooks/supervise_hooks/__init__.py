"""In-process half of `supervise`: `attach` a training script, and its work survives. Importing this imports no torch.

Names are loaded when first used: the daemon imports `supervise_hooks.contract` and must not pay for the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from supervise_hooks.attaching import attach
    from supervise_hooks.contract.errors import CheckpointError, ContractError, SuperviseError
    from supervise_hooks.session import Session

__version__ = "0.1.0"
__all__ = ["CheckpointError", "ContractError", "Session", "SuperviseError", "__version__", "attach"]

_HOMES = {
    "attach": "supervise_hooks.attaching",
    "Session": "supervise_hooks.session",
    "CheckpointError": "supervise_hooks.contract.errors",
    "ContractError": "supervise_hooks.contract.errors",
    "SuperviseError": "supervise_hooks.contract.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
