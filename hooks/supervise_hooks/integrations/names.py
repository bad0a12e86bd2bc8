"""Names of a model's tensors as the user wrote them, whatever DDP, DataParallel and torch.compile put around or between."""

from collections.abc import Callable

import torch

_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Names in the model -> names as the user wrote them, without the levels that DDP and torch.compile put in between.

    A submodule that the user called `module` keeps its name.
    """
    levels = set()
    for name, module in model.named_modules(remove_duplicate=False):
        inner = _inner(module)
        if inner is not None:
            levels.add(f"{name}.{inner[0]}".lstrip("."))

    def plain(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for number, part in enumerate(parts, 1) if ".".join(parts[:number]) not in levels)

    return plain if levels else str


def _inner(module: torch.nn.Module) -> tuple[str, torch.nn.Module] | None:
    """(attribute, module) inside a wrapper of DDP, DataParallel or torch.compile; None for any other module.

    Looks at real children: wrappers of others pass attributes on, and would seem to be what they contain.
    """
    children = dict(module.named_children())
    name = "_orig_mod" if "_orig_mod" in children else "module" if isinstance(module, _WRAPPERS) else None
    return None if name is None else (name, children[name])


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, DataParallel and torch.compile."""
    while (inner := _inner(model)) is not None:
        model = inner[1]
    return model
