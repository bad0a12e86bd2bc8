"""State dicts -> JSON plus tensors, and back. Nothing is pickled; decoding calls nothing that the file names.

JSON has no tuples, bytes, infinities or integer keys: those become one-key objects whose key begins with `$`.
"""

import base64
import collections
import datetime
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from supervise_hooks.contract.errors import CheckpointError, SuperviseError
from supervise_hooks.integrations.raw import why_unstorable

Tensors = dict[str, torch.Tensor]
_MAX_SAFE_INT = 2**53


class Encoder:
    """Encodes values; tensors are collected under their path, offenders under theirs."""

    def __init__(self, prefix: str) -> None:
        self.tensors: Tensors = {}
        self.offenders: list[str] = []
        self._prefix = prefix

    def encode(self, value: Any, path: str = "") -> Any:
        """A JSON value. Unknown types are noted as offenders; call `check` in the end."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < _MAX_SAFE_INT else {"$int": str(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            why = why_unstorable(value)
            if why is not None:
                return self._refuse(path, f"a tensor, but {why}")
            return {"$tensor": self._store(path, value.detach())}
        simple = _SIMPLE.get(kind)
        if simple is not None:
            return {simple[0]: simple[1](value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
            return {"$ndarray": [self._store(path, raw), value.dtype.str, list(value.shape)]}
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return {"$npscalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        return self._container(value, kind, path)

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if kind is list:
            return [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]
        if kind is torch.Size:
            return {"$size": list(value)}
        if kind in (tuple, set, frozenset):
            items = sorted(value, key=repr) if kind is not tuple else value
            return {f"${kind.__name__}": [self.encode(item, f"{path}.{index}") for index, item in enumerate(items)]}
        if kind is collections.deque:
            return {"$deque": [value.maxlen, [self.encode(item, f"{path}.{index}") for index, item in enumerate(value)]]}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        if kind in _MAPPINGS or kind is collections.defaultdict:
            pairs = [[self.encode(key, f"{path}.key"), self.encode(item, f"{path}.{key}")] for key, item in value.items()]
            if kind in _MAPPINGS:
                return {_MAPPINGS[kind]: pairs}
            factory = next((name for name, known in _FACTORIES.items() if known is value.default_factory), "")
            if factory:
                return {"$defaultdict": [factory, pairs]}
            return self._refuse(path, f"a defaultdict that makes {value.default_factory!r}")
        return self._refuse(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _refuse(self, path: str, what: str) -> None:
        self.offenders.append(f"{path.lstrip('.') or 'the value'} is {what}")

    def _store(self, path: str, tensor: torch.Tensor) -> str:
        key = base = f"{self._prefix}{path}"
        number = 1
        while key in self.tensors:  # {1: t, "1": t} have one path
            number += 1
            key = f"{base}~{number}"
        self.tensors[key] = tensor
        return key

    def check(self, what: str) -> None:
        """Raise SuperviseError naming every value that cannot be stored."""
        if self.offenders:
            raise SuperviseError(f"cannot save {what}: no safe form for: {'; '.join(self.offenders[:20])}")


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that was encoded. Raises CheckpointError for what no encoder writes."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    try:
        if tag == "$tensor":
            return tensors[content]
        if tag == "$ndarray":
            return np.frombuffer(tensors[content[0]].numpy().tobytes(), dtype=_numeric(content[1])).reshape(content[2]).copy()
        if tag in ("$tuple", "$set", "$frozenset"):
            return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](decode(item, tensors) for item in content)
        if tag == "$deque":
            return collections.deque((decode(item, tensors) for item in content[1]), content[0])
        if tag == "$defaultdict":
            pairs = ((decode(key, tensors), decode(item, tensors)) for key, item in content[1])
            return collections.defaultdict(_FACTORIES[content[0]], pairs)
        if tag in _FROM_PAIRS:
            return _FROM_PAIRS[tag]([(decode(key, tensors), decode(item, tensors)) for key, item in content])
        return _FROM_SIMPLE[tag](content)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"cannot read state: {tag} holds {str(content)[:80]!r}: {error}") from None


def _numeric(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in "biufc":
        raise ValueError(f"dtype {text!r} is not numeric")
    return dtype


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def _pairs_to_counter(pairs: list[tuple[Any, Any]]) -> Any:
    return collections.Counter(dict(pairs))


_SIMPLE: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    bytearray: ("$bytearray", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [repr(value.real), repr(value.imag)]),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    pathlib.PosixPath: ("$path", str),
    datetime.datetime: ("$datetime", lambda value: value.isoformat()),
    datetime.timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
}
_FROM_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "$int": int,
    "$float": float,
    "$size": torch.Size,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$bytearray": lambda content: bytearray(base64.b64decode(content, validate=True)),
    "$complex": lambda content: complex(float(content[0]), float(content[1])),
    "$dtype": _torch_dtype,
    "$device": torch.device,
    "$path": pathlib.Path,
    "$datetime": datetime.datetime.fromisoformat,
    "$timedelta": lambda content: datetime.timedelta(*content),
    "$npscalar": lambda content: np.frombuffer(base64.b64decode(content[1]), dtype=_numeric(content[0]))[0],
}
_MAPPINGS: dict[type, str] = {
    dict: "$dict",
    collections.OrderedDict: "$odict",
    collections.Counter: "$counter",
}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None, "int": int, "float": float, "list": list, "dict": dict, "set": set,
}  # fmt: skip
"""What a defaultdict may make of a missing key."""
_FROM_PAIRS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "$dict": dict,
    "$odict": collections.OrderedDict,
    "$counter": _pairs_to_counter,
}
