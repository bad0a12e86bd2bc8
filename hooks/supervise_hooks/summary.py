"""The lines people read: one for every save and resume, differences of configuration, failures.

Through the logger "supervise_hooks"; where the script has configured no logging at all, on stderr, so that they are seen.
"""

import logging
import math
import sys
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("supervise_hooks")


class Teller:
    """Tells rank 0's news aloud, other ranks' at debug level; trouble is told by every rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._loud = rank == 0
        self._prefix = f"rank {rank}: " if world_size > 1 else ""

    def news(self, text: str) -> None:
        """Something expected happened."""
        if not self._loud:
            log.debug("%s%s", self._prefix, text)
        elif log.hasHandlers():
            log.info("%s", text)
        else:  # logging's own last resort shows only warnings
            print(f"supervise: {text}", file=sys.stderr, flush=True)  # noqa: T201

    def trouble(self, text: str, error: BaseException | None = None) -> None:
        """Something failed; training goes on. `error`: its traceback is added."""
        log.warning("%s%s", self._prefix, text, exc_info=error)


def number(value: float) -> str:
    """A short number."""
    return f"{value:.4g}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def checkpoint_line(verb: str, path: str, facts: Mapping[str, Any]) -> str:
    """`saved /c/step-000000040: epoch 1, step 40, loss 2.41, lr 0.0003, 12.3 MiB in 0.2 s`."""
    parts = [f"{name} {facts[name]}" for name in ("epoch", "step") if facts.get(name) is not None]
    parts += [f"{name} {number(value)}" for name, value in facts.get("values", {}).items()]
    parts.append(f"{size(facts['size'])} in {facts['seconds']:.1f} s")
    return f"{verb} {path}: {', '.join(parts)}"


def shown_values(values: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """What a summary line shows: the loss, then the learning rates."""
    return {name: value for name, value in values.items() if "loss" in name} | dict(rates)


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Logged values as plain numbers.

    What is no single number is left out, and so are infinity and not-a-number, which have no JSON form.
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            plain = float(value)
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
            continue
        if math.isfinite(plain):
            numbers[name] = plain
    return numbers


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for each that differs, nested keys with dots."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        if key not in new:
            lines.append(f"{name}: {old[key]!r} -> (gone)")
        elif key not in old:
            lines.append(f"{name}: (new) -> {new[key]!r}")
        elif isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            lines += differences(old[key], new[key], f"{name}.")
        elif old[key] != new[key]:
            lines.append(f"{name}: {old[key]!r} -> {new[key]!r}")
    return lines
