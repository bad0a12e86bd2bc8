"""Random state of this process: Python, NumPy, torch's CPU generator and those of every CUDA device. Nothing else is touched."""

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """All of it, as plain values and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def apply(states: dict[str, Any]) -> None:
    """Put back what `capture` gave. Fewer CUDA devices than were saved: those that exist get theirs."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
