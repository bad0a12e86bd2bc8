"""Optimizer state by parameter name instead of by number, saved without ever running a step. Works on `state_dict()` alone.

torch's own get_optimizer_state_dict runs optimizer.step() to create missing state, which would count as a step (2.13).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from supervise_hooks.contract.errors import CheckpointError
from supervise_hooks.integrations.codec import Encoder, decode

Named = dict[str, torch.Tensor]


class OptimizerState:
    """One optimizer and the names of its parameters."""

    def __init__(self, prefix: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """`names`: by id of the parameter; one that no model has is called by its position."""
        self.prefix = prefix
        self.optimizer = optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._parameters = parameters
        self._names = [names.get(id(parameter), f"#{index}") for index, parameter in enumerate(parameters)]

    def split(self, encoder: Encoder) -> tuple[Named, Any]:
        """(tensors to be sharded, by full name; JSON of everything else)."""
        state = self.optimizer.state_dict()
        named: Named = {}
        rest: dict[str, Any] = {}
        # By something else than a parameter: an optimizer's global state.
        others = {index: values for index, values in state["state"].items() if not isinstance(index, int)}
        for index, values in state["state"].items():
            if index in others:
                continue
            name = self._names[index]
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    named[f"{self.prefix}.{name}.{key}"] = value
                else:
                    rest.setdefault(name, {})[key] = value
        groups = [{**group, "params": [self._names[index] for index in group["params"]]} for group in state["param_groups"]]
        keys = {self._names[index]: list(values) for index, values in state["state"].items() if isinstance(index, int)}
        return named, encoder.encode({"groups": groups, "rest": rest, "keys": keys, "others": others}, f".{self.prefix}")

    def mismatches(self, stored: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Why the stored state does not belong to this optimizer; empty when it does."""
        saved = decode(stored, tensors)
        here = [[self._names[index] for index in group["params"]] for group in self.optimizer.state_dict()["param_groups"]]
        there = [group["params"] for group in saved["groups"]]
        if here == there:
            return []
        missing = {name for group in here for name in group} - {name for group in there for name in group}
        extra = {name for group in there for name in group} - {name for group in here for name in group}
        if not missing and not extra:
            return [f"{self.prefix}: parameters are grouped otherwise: {len(there)} groups were saved, there are {len(here)}"]
        return [f"{self.prefix}: no saved state for {name}" for name in sorted(missing)] + [
            f"{self.prefix}: saved state for {name}, which it does not have" for name in sorted(extra)
        ]

    def targets(self, stored: Any, specification: Any, tensors: Mapping[str, torch.Tensor]) -> Named:
        """Empty tensors to load into, by full name: placed like their parameter where they have its shape.

        Raises CheckpointError when something that was saved is in no file.
        """
        parameters = dict(zip(self._names, self._parameters, strict=True))
        targets: Named = {}
        saved = decode(stored, tensors)
        for name, keys in saved["keys"].items():
            for key in keys:
                full = f"{self.prefix}.{name}.{key}"
                try:
                    dtype, shape = specification(full)
                except KeyError:
                    if key not in saved["rest"].get(name, {}):
                        raise CheckpointError(f"cannot load {full}: it was saved, but no file has it") from None
                    continue  # not a tensor
                parameter = parameters[name]
                if isinstance(parameter, DTensor) and parameter.shape == shape:
                    targets[full] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    targets[full] = torch.empty(shape, dtype=dtype)
        return targets

    def restore(self, stored: Any, loaded: Named, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give the loaded state to the optimizer."""
        saved = decode(stored, tensors)
        index_of = {name: index for index, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for name, keys in saved["keys"].items():
            values = state.setdefault(index_of[name], {})
            for key in keys:
                full = f"{self.prefix}.{name}.{key}"
                values[key] = loaded[full] if full in loaded else saved["rest"][name][key]
        groups = [{**group, "params": [index_of[name] for name in group["params"]]} for group in saved["groups"]]
        self.optimizer.load_state_dict({"state": {**state, **saved["others"]}, "param_groups": groups})
        self._undo_casts(state)

    def _undo_casts(self, state: dict[int, dict[str, Any]]) -> None:
        """load_state_dict casts float state to its parameter's dtype (fp32 moments of bf16 weights): put back what was saved."""
        for index, values in state.items():
            live = self.optimizer.state[self._parameters[index]]
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor) and live[key].dtype != value.dtype:
                    live[key] = value.to(device=live[key].device)
