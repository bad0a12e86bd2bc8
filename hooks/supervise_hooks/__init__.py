"""In-process half of `supervise`: `attach` a training script, and its work survives. Importing this imports no torch."""

__version__ = "0.1.0"

from supervise_hooks.attaching import attach
from supervise_hooks.contract.errors import CheckpointError, ContractError, SuperviseError
from supervise_hooks.session import Session

__all__ = ["CheckpointError", "ContractError", "Session", "SuperviseError", "__version__", "attach"]
