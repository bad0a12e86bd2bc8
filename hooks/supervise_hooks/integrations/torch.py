"""`TorchState`: everything a PyTorch loop needs to go on as if nothing had happened. Implements `state.TrainingState`.

What is replicated or sharded over ranks goes through `dcp`, by name; what is each rank's own (random state, position in the
data, buffers that DDP lets drift, objects) goes into that rank's files.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from supervise_hooks.contract import digests, layout, tensors
from supervise_hooks.contract.errors import CheckpointError, ContractError, SuperviseError
from supervise_hooks.contract.manifest import Metric, Receipt, read_manifest
from supervise_hooks.integrations import rng as random_state
from supervise_hooks.integrations.codec import Encoder, decode
from supervise_hooks.integrations.dcp import (
    RankFiles,
    RankSavePlanner,
    RankStorageWriter,
    alone,
    as_part,
    assign_owners,
    read_range,
)
from supervise_hooks.integrations.names import plain_names, unwrap
from supervise_hooks.integrations.optimizers import OptimizerState
from supervise_hooks.integrations.raw import bytes_of, from_buffer, to_buffer, why_unstorable
from supervise_hooks.state import Loaded, SaveContext
from supervise_hooks.world import find_world
from supervise_hooks.writing import write_rank

SCHEMA = 1
_SHOWN = 20
_SMALL_BYTES = 64 << 10


class _Ready(msgspec.Struct, frozen=True):
    """A rank's own state, decoded: what cannot be read is known before anything is changed."""

    modes: set[str]
    objects: dict[str, Any]
    extra: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    data: tuple[Any] | None
    rng: Any
    loaded: Loaded


class TorchState:
    """Saves and restores one rank's share of a training state."""

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        objects: Mapping[str, Any] | None = None,
        rng: bool = True,
    ) -> None:
        """`model`, `optimizer`: one, or a dict of several by name. Raises SuperviseError naming every object that cannot be saved."""
        # Kept alive with the session, that is beyond the script's last line: a DDP wrapper that goes with main()'s frame joins gloo's
        # threads while it holds the GIL one of them waits for, and the rank never exits (torch 2.13).
        self._given = model
        self._models = {name: unwrap(module) for name, module in _by_name("model", model, torch.nn.Module).items()}
        parameter_names = {
            id(parameter): name.removeprefix("model.")
            for name, parameter in self._named("named_parameters")
            if parameter is not None
        }
        self._optimizers = [
            OptimizerState(name, one, parameter_names)
            for name, one in _by_name("optimizer", optimizer, torch.optim.Optimizer).items()
        ]
        self._objects = {"scheduler": scheduler, "scaler": scaler, **(objects or {})}
        self._objects = {name: one for name, one in self._objects.items() if one is not None}
        self._loader = loader
        self._rng = rng
        self._pending_rng: Any = None
        self._check_objects()
        self._buffer_digests = {name: _digest(buffer) for name, buffer in self._plain_buffers().items()}
        encoder = Encoder("rank")
        self._encode_state(encoder)
        for one in self._optimizers:
            one.split(encoder)
        encoder.check("the training state")

    def _check_objects(self) -> None:
        wrong = []
        for name, one in self._objects.items():
            lacking = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(one, method, None))]
            if lacking:
                wrong.append(f"{name} ({type(one).__name__}) has no {' and no '.join(lacking)}")
        wrong += [
            f"{name} cannot be stored: {why}"
            for name, tensor in self._model_tensors().items()
            if (why := why_unstorable(_local(tensor)))
        ]
        if wrong:
            raise SuperviseError(f"cannot attach: {'; '.join(wrong)}")

    # --- what there is

    def _named(self, method: str) -> Iterator[tuple[str, Any]]:
        for prefix, model in self._models.items():
            plain = plain_names(model)
            for name, value in getattr(model, method)():
                yield f"{prefix}.{plain(name)}", value

    def _model_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for prefix, model in self._models.items():
            plain = plain_names(model)
            state |= {f"{prefix}.{plain(key)}": value for key, value in model.state_dict().items()}
        return state

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self._model_state().items() if isinstance(value, torch.Tensor)}

    def _plain_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that are in the state dict and not sharded: under DDP, ranks differ in them until rank 0's are broadcast."""
        saved = self._model_tensors()
        return {
            name: buffer for name, buffer in self._named("named_buffers") if name in saved and not isinstance(buffer, DTensor)
        }

    # --- saving

    def save(self, folder: Path, context: SaveContext) -> Receipt:
        """Write this rank's part and its receipt. Raises CheckpointError, whatever a state_dict or a device does."""
        try:
            return self._save(folder, context)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot save step {context.step} to {folder}: {type(error).__name__}: {error}") from error

    def _save(self, folder: Path, context: SaveContext) -> Receipt:
        encoder = Encoder("rank")
        record, named = self._collect(encoder, context)
        try:
            encoder.check(f"step {context.step}")
        except SuperviseError as error:
            raise CheckpointError(str(error)) from None
        writer = RankStorageWriter()
        owners = assign_owners(named, frozenset(self._plain_buffers()), context.world_size)
        if named:
            # no_dist: DCP's own collectives would hang with a hung peer.
            with alone():
                dcp_save(dict(named), storage_writer=writer, planner=RankSavePlanner(context.rank, owners), no_dist=True)
        parts = writer.parts + [as_part(key, tensor) for key, tensor in encoder.tensors.items()]
        content = json.dumps(record, indent=1, allow_nan=False).encode() + b"\n"
        return write_rank(folder, context, parts, content, replicated=_layout(named))

    def _collect(self, encoder: Encoder, context: SaveContext) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        named = self._model_tensors()
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "step": context.step,
            "epoch": context.epoch,
            "world_size": context.world_size,
            "rank": context.rank,
            "values": encoder.encode(context.values, ".values"),
            "metric": None if context.metric is None else [context.metric.name, repr(context.metric.value), context.metric.mode],
            "config": encoder.encode(context.config, ".config"),
        }
        record |= self._encode_state(encoder)
        for optimizer in self._optimizers:
            tensors_, record.setdefault("optimizers", {})[optimizer.prefix] = optimizer.split(encoder)
            named |= tensors_
        boundary = context.rng if context.rng is not None else self.capture_rng()
        record["modes"] = boundary["modes"]
        if boundary["states"] is not None:
            record["rng"] = encoder.encode(boundary["states"], ".rng")
        for name, buffer in self._plain_buffers().items() if context.rank > 0 else ():  # rank 0's are the shared ones
            # One unchanged here may have changed on rank 0, so small ones always go: a large one is taken for a constant.
            if bytes_of(buffer) <= _SMALL_BYTES or _digest(buffer) != self._buffer_digests[name]:
                record.setdefault("buffers", {})[name] = encoder.encode(buffer, f".buffer.{name}")
        return record, named

    def _encode_state(self, encoder: Encoder) -> dict[str, Any]:
        """The parts whose encodability is checked at attach already."""
        extra = {name: value for name, value in self._model_state().items() if not isinstance(value, torch.Tensor)}
        record: dict[str, Any] = {
            "extra": encoder.encode(extra, ".extra"),
            "objects": {name: encoder.encode(one.state_dict(), f".objects.{name}") for name, one in self._objects.items()},
        }
        if self._loader is not None:
            record["data"] = encoder.encode(self._loader.state_dict(), ".data")
        return record

    # --- loading

    def load(self, folder: Path) -> Loaded:
        """Restore everything but random state. Reads and checks all before it changes anything. Raises CheckpointError."""
        try:
            record, stored, own, ready = self._read(folder)
        except (OSError, ContractError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot load {folder}: {error}") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"cannot load {folder}: its state file is not what this version writes: {error!r}") from error
        part = "tensors"
        try:
            self._restore_tensors(record, stored, own, ready)
            part = "the training modes"
            for name, module in self._named("named_modules"):
                module.training = name not in ready.modes
            for name, one in self._objects.items():
                part = name
                one.load_state_dict(ready.objects[name])
            if self._loader is not None and ready.data is not None:
                part = "the position in the data"
                self._loader.load_state_dict(ready.data[0])
        except Exception as error:
            raise CheckpointError(f"cannot load {part} from {folder}: {type(error).__name__}: {error}") from error
        self._pending_rng = ready.rng
        return ready.loaded

    def _read(self, folder: Path) -> tuple[Any, RankFiles, dict[str, torch.Tensor], _Ready]:
        manifest = read_manifest(folder)
        rank, world = _rank_and_world()
        source, same = rank % manifest.world_size, world == manifest.world_size
        record = json.loads((folder / layout.state_name(source, manifest.world_size)).read_bytes())
        stored = RankFiles([folder / entry.path for entry in manifest.files if entry.path.endswith(".safetensors")])
        own = _own_tensors(folder / layout.tensors_name(source, manifest.world_size))
        self._check_match(folder, record, stored, own)
        note = (
            f"saved by {manifest.world_size} ranks, loaded by {world}: random state is not restored, "
            f"rank {rank} takes rank {source}'s objects"
        )
        metric = record["metric"]
        ready = _Ready(
            modes=set(record["modes"]),
            objects={name: decode(record["objects"][name], own) for name in self._objects},
            extra=decode(record["extra"], own),
            buffers={name: decode(value, own) for name, value in record.get("buffers", {}).items()} if same else {},
            data=(decode(record["data"], own),) if "data" in record else None,
            rng=decode(record["rng"], own) if self._rng and "rng" in record and same else None,
            loaded=Loaded(
                step=record["step"],
                epoch=record["epoch"],
                world_size=manifest.world_size,
                best=None if metric is None else Metric(metric[0], float(metric[1]), metric[2]),
                values=decode(record["values"], own),
                config=decode(record["config"], own),
                size=manifest.size,
                notes=() if same else (note,),
            ),
        )
        return record, stored, own, ready

    def _check_match(self, folder: Path, record: Any, stored: RankFiles, own: Mapping[str, torch.Tensor]) -> None:
        """One error that lists everything that does not fit; nothing has been changed yet."""
        here = self._model_tensors()
        prefixes = tuple(f"{prefix}." for prefix in self._models)
        there = {name for name in stored.names() if name.startswith(prefixes)}
        missing, unexpected = sorted(set(here) - there), sorted(there - set(here))
        problems = [
            f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        if missing and {_unwrapped(name) for name in missing} & {_unwrapped(name) for name in unexpected}:
            problems.append(
                "the names differ only by `module.`: the model was wrapped (DDP, compile) on one side; give attach() the same model"
            )
        for name in sorted(set(here) & there):
            dtype, shape = stored.specification(name)
            if shape != here[name].shape or dtype != here[name].dtype:
                problems.append(f"{name} is {tuple(shape)} {dtype} there and {tuple(here[name].shape)} {here[name].dtype} here")
        saved = record.get("optimizers", {})
        for optimizer in self._optimizers:
            if optimizer.prefix not in saved:
                problems.append(f"{optimizer.prefix} is not in the checkpoint")
            else:
                problems += optimizer.mismatches(saved[optimizer.prefix], own)
        ours, theirs = {one.prefix for one in self._optimizers}, set(saved)
        problems += [
            f"{name} is in the checkpoint but was not given to attach()"
            for name in sorted((theirs - ours) | (set(record["objects"]) - set(self._objects)))
        ]
        problems += [f"{name} is not in the checkpoint" for name in sorted(set(self._objects) - set(record["objects"]))]
        extra = {name for name, value in self._model_state().items() if not isinstance(value, torch.Tensor)}
        problems += [f"{name} is on one side only" for name in sorted(extra ^ set(record["extra"]))]
        if problems:
            raise CheckpointError(
                f"cannot load {folder}: it does not fit what was given to attach(): {'; '.join(problems[: 2 * _SHOWN])}"
            )

    def _restore_tensors(self, record: Any, stored: RankFiles, own: Mapping[str, torch.Tensor], ready: _Ready) -> None:
        targets = self._model_tensors()
        saved = record.get("optimizers", {})
        loaded = {one.prefix: one.targets(saved[one.prefix], stored.specification, own) for one in self._optimizers}
        wanted: dict[str, Any] = {**targets, **{name: tensor for group in loaded.values() for name, tensor in group.items()}}
        if wanted:
            with alone():
                dcp_load(wanted, storage_reader=stored, no_dist=True)
        for prefix, model in self._models.items():
            plain = plain_names(model)
            state = model.state_dict()
            for key in state:
                name = f"{prefix}.{plain(key)}"
                state[key] = ready.extra[name] if name in ready.extra else ready.buffers.get(name, targets[name])
            # The targets are the live tensors, as a rule. A hook of the model's own may have given copies: it takes them back here.
            # Not strict: that keys match is checked, and one that leaves frozen parts out of its state_dict lacks them here too.
            refused = getattr(model.load_state_dict(state, strict=False), "unexpected_keys", [])
            if refused:
                raise CheckpointError(
                    f"{prefix} gives keys in its state_dict that it does not take back: {', '.join(refused[:_SHOWN])}"
                )
        for optimizer in self._optimizers:
            optimizer.restore(saved[optimizer.prefix], loaded[optimizer.prefix], own)

    # --- random state and numbers

    def restore_rng(self) -> None:
        """Apply the random state of the last `load`, once."""
        states, self._pending_rng = self._pending_rng, None
        if states is not None:
            random_state.apply(states)

    def capture_rng(self) -> Any:
        """This rank's random state now, and which modules are not in training mode: an evaluation changes both."""
        return {
            "states": random_state.capture() if self._rng else None,
            "modes": sorted(name for name, module in self._named("named_modules") if not module.training),
        }

    def apply_rng(self, rng: Any) -> None:
        """Put the random state of `capture_rng` back; modes are the script's to put back."""
        if rng["states"] is not None:
            random_state.apply(rng["states"])

    def rates(self) -> dict[str, float]:
        """Learning rate of the first parameter group."""
        for optimizer in self._optimizers:
            return {"lr": float(optimizer.optimizer.param_groups[0]["lr"])}
        return {}

    def estimated_bytes(self) -> int:
        """About what this rank's next save writes."""
        named = self._model_tensors()
        for optimizer in self._optimizers:
            named |= optimizer.split(Encoder("rank"))[0]
        _, world = _rank_and_world()
        return sum(
            _local(tensor).numel() * tensor.element_size() // (1 if isinstance(tensor, DTensor) else world)
            for tensor in named.values()
        )


def _unwrapped(name: str) -> str:
    return name.replace(".module.", ".").replace("._orig_mod.", ".")


def _rank_and_world() -> tuple[int, int]:
    """As the session sees it: ranks may have been started by torchrun and never have opened a process group."""
    world = find_world(os.environ)
    return world.rank, world.world_size


def _by_name(kind: str, given: Any, wanted: type) -> dict[str, Any]:
    """{"model": m}, or {"model.<name>": m} for a dict of several. Raises SuperviseError for anything else."""
    if given is None:
        return {}
    several = {f"{kind}.{name}": one for name, one in given.items()} if isinstance(given, Mapping) else {kind: given}
    wrong = [
        f"{name} is a {type(one).__name__}, not a {wanted.__name__}"
        for name, one in several.items()
        if not isinstance(one, wanted)
    ]
    if wrong:
        raise SuperviseError(f"cannot attach: {'; '.join(wrong)}")
    return several


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(named: Mapping[str, torch.Tensor]) -> str:
    """Digest of what this rank takes to be on all ranks: receipts that differ in it are not sealed, or tensors would be lost silently."""
    plain = sorted(f"{name} {tuple(tensor.shape)}\n" for name, tensor in named.items() if not isinstance(tensor, DTensor))
    return digests.digest_buffers(line.encode() for line in plain) if plain else ""


def _digest(tensor: torch.Tensor) -> str:
    return digests.digest_buffers([to_buffer(tensor)])


def _own_tensors(path: Path) -> dict[str, torch.Tensor]:
    """This rank's own tensors: the entries of its file that are no pieces of something larger."""
    header = tensors.read_header(path)
    return {
        key: from_buffer(
            read_range(path, header.data_start + entry.data_offsets[0], entry.data_offsets[1] - entry.data_offsets[0]),
            entry.dtype,
            entry.shape,
        )
        for key, entry in header.entries.items()
        if key not in header.pieces
    }
