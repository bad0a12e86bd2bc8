"""The PyTorch state where things go wrong or are unusual: no silent loss, no partial load, no error that a training loop cannot catch."""

import collections
import errno
import json
import multiprocessing
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from supervise_hooks import writing
from supervise_hooks.contract import layout, sealing, tensors
from supervise_hooks.contract.errors import CheckpointError, SuperviseError
from supervise_hooks.contract.verification import verify_sealed
from supervise_hooks.integrations import dcp
from supervise_hooks.integrations.torch import TorchState
from supervise_hooks.state import SaveContext

pytestmark = pytest.mark.torch


def context(step: int = 1, rank: int = 0, world_size: int = 1) -> SaveContext:
    """A save of attempt 1."""
    return SaveContext(run_id="r", attempt=1, rank=rank, world_size=world_size, step=step, epoch=0, reason="periodic")


def saved(folder: Path, **given: Any) -> Path:
    """A sealed checkpoint of one rank."""
    TorchState(**given).save(folder, context())
    assert sealing.seal(folder)[0] is not None
    return folder


def entries(folder: Path, rank: int, world_size: int) -> list[tuple[str, tensors.Entry]]:
    """What a rank's tensor file holds."""
    return list(tensors.read_header(folder / layout.tensors_name(rank, world_size)).entries.items())


class Holder:
    """An object of the user's that holds one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Its value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the value."""
        self.value = state["value"]


# --- errors


def test_a_tensor_that_cannot_be_stored_is_an_ordinary_error_that_names_it(tmp_path: Path) -> None:
    """DCP raises BaseExceptions, which would end the training: a save gives a CheckpointError, and leaves nothing."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state = TorchState(model=model, optimizer=optimizer)
    optimizer.state[model.weight]["mask"] = torch.eye(4).to_sparse()
    with pytest.raises(CheckpointError, match=r"optimizer\.weight\.mask: its layout is torch\.sparse_coo"):
        state.save(tmp_path / "step-000000001", context())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_without_raw_bytes_are_refused_at_attach(value: torch.Tensor) -> None:
    """Sparse and meta tensors inside an object are named before the first step, not at the first save."""
    with pytest.raises(SuperviseError, match=r"objects\.holder\.value is a tensor, but it"):
        TorchState(objects={"holder": Holder(value)})


def test_an_object_that_fails_while_saving_is_a_failed_save(tmp_path: Path) -> None:
    """Whatever a state_dict raises in mid-training comes out as a CheckpointError naming step and cause."""
    holder = Holder(1)
    state = TorchState(objects={"holder": holder})
    holder.state_dict = lambda: {}[0]  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="cannot save step 1 to .*KeyError"):
        state.save(tmp_path / "step-000000001", context())


def test_a_disk_error_while_loading_is_an_ordinary_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO below DCP is a CheckpointError that says so."""
    folder = saved(tmp_path / "step-000000001", model=nn.Linear(8, 8))

    def broken(*_: object) -> bytearray:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(dcp, "read_range", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        TorchState(model=nn.Linear(8, 8)).load(folder)


@pytest.mark.parametrize("content", ['{"$eval": "1"}', "[" * 100_000, '{"step": 1}', "null"])
def test_state_that_cannot_be_read_changes_nothing(tmp_path: Path, content: str) -> None:
    """A hostile object, endless nesting, missing fields: one CheckpointError, and the model is as it was."""
    folder = saved(tmp_path / "step-000000001", model=nn.Linear(2, 2), objects={"holder": Holder(1)})
    path = folder / layout.state_name(0, 1)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record).replace('{"value": 1}', content) if content.startswith('{"$') else content)
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError):
        TorchState(model=model, objects={"holder": Holder(1)}).load(folder)
    assert torch.equal(before, model.weight)


def test_optimizer_state_that_no_file_has_changes_nothing(tmp_path: Path) -> None:
    """The state file speaks of a moment that lies in no tensor file: said by name before anything is loaded."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = saved(tmp_path / "step-000000001", model=model, optimizer=optimizer)
    path = folder / layout.state_name(0, 1)
    path.write_text(path.read_text().replace('"momentum_buffer"', '"lost"'))
    fresh = nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"cannot load optimizer\.weight\.lost: it was saved, but no file has it"):
        TorchState(model=fresh, optimizer=torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)).load(folder)
    assert torch.equal(before, fresh.weight)


# --- nothing is lost in silence


class Shadowed(nn.Module):
    """A user's model that happens to have a part called `module`, with a tensor of the same name as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))


class Forwarding(nn.Module):
    """A wrapper that passes attributes on to what it contains, and has a tensor of its own, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.compile(nn.Linear(2, 2))
        self.adapter = nn.Parameter(torch.randn(2))

    def __getattr__(self, name: str) -> Any:
        """The inner module's, if it is not our own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class Copying(nn.Module):
    """A model whose state_dict gives copies, as hooks for quantisation and adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_state_dict_post_hook(lambda _m, state, _p, _l: state.update({k: v.clone() for k, v in state.items()}))


@pytest.mark.parametrize("build", [Shadowed, Forwarding, Copying, lambda: torch.compile(Shadowed())])
def test_every_tensor_of_an_unusual_model_comes_back(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    """Parts called `module`, wrappers that forward attributes, hooks that copy: every parameter is the saved one."""
    model, fresh = build(), build()
    folder = saved(tmp_path / "step-000000001", model=model)
    TorchState(model=fresh).load(folder)
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_compiled_part_is_saved_under_the_users_names(tmp_path: Path) -> None:
    """A checkpoint of a model with a compiled part loads into one that is not compiled."""
    plain, compiled = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(torch.compile(nn.Linear(2, 2)))
    TorchState(model=plain).load(saved(tmp_path / "step-000000001", model=compiled))
    assert torch.equal(plain[0].weight, compiled[0].weight)


def test_optimizer_state_of_no_parameter_comes_back(tmp_path: Path) -> None:
    """What an optimizer keeps under a name of its own is neither lost nor taken for a parameter's."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        return model, torch.optim.SGD(model.parameters(), lr=1)

    model, optimizer = build()
    optimizer.state["global"] = {"norm": torch.tensor(2.5), "count": 3}  # type: ignore[index]
    folder = saved(tmp_path / "step-000000001", model=model, optimizer=optimizer)
    fresh, other = build()
    TorchState(model=fresh, optimizer=other).load(folder)
    assert other.state["global"] == {"norm": torch.tensor(2.5), "count": 3}  # type: ignore[index]


def test_extra_state_missing_on_one_side_is_an_error(tmp_path: Path) -> None:
    """A module's extra state that the checkpoint lacks is listed like a missing key."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"x": 1}

        def set_extra_state(self, state: Any) -> None:
            """Not reached."""

    with pytest.raises(CheckpointError, match=r"model\._extra_state is on one side only"):
        TorchState(model=Extra(2, 2)).load(saved(tmp_path / "step-000000001", model=nn.Linear(2, 2)))


def test_a_defaultdict_goes_on_making_its_defaults(tmp_path: Path) -> None:
    """Known factories come back, others are refused at attach by name."""
    holder = Holder()
    folder = saved(tmp_path / "step-000000001", objects={"holder": Holder(collections.defaultdict(list, {"a": [1]}))})
    TorchState(objects={"holder": holder}).load(folder)
    assert holder.value["new"] == []
    with pytest.raises(SuperviseError, match=r"objects\.holder\.value is a defaultdict that makes"):
        TorchState(objects={"holder": Holder(collections.defaultdict(lambda: 1))})


def test_a_ranks_buffer_survives_though_only_rank_0_changed_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's statistics never moved, rank 0's did: rank 1 gets its own back, not rank 0's; rank 1 is known from the environment."""
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    states = [TorchState(model=model) for model in models]
    models[0](torch.randn(4, 2) + 5)
    folder = tmp_path / "step-000000001"
    for rank, state in enumerate(states):
        state.save(folder, context(rank=rank, world_size=2))
    sealing.seal(folder)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    fresh = nn.BatchNorm1d(2)
    assert TorchState(model=fresh).load(folder).notes == ()
    assert torch.equal(fresh.running_mean, models[1].running_mean)
    assert not torch.equal(fresh.running_mean, models[0].running_mean)


def _without_base(_module: nn.Module, state: dict[str, Any], _prefix: str, _local: Any) -> None:
    for key in [key for key in state if "base" in key]:
        del state[key]


class Adapted(nn.Module):
    """A frozen base that its state_dict leaves out, as adapters do: only the rest is a checkpoint's business."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_state_dict_post_hook(_without_base)


def test_a_model_that_leaves_frozen_parts_out_resumes(tmp_path: Path) -> None:
    """What the model's own state_dict holds comes back; what it leaves out stays as the script made it."""
    model, fresh = Adapted(), Adapted()
    base = fresh.base.weight.detach().clone()
    TorchState(model=fresh).load(saved(tmp_path / "step-000000001", model=model))
    assert torch.equal(model.adapter.weight, fresh.adapter.weight)
    assert torch.equal(base, fresh.base.weight)


def _save_alone(folder: Path, whole: torch.Tensor, rank: int) -> None:
    """Save as one of four ranks of a 2x2 mesh, over a process group that communicates with nobody."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    placements = [Replicate(), Shard(0)]
    mesh = init_device_mesh("cpu", (2, 2))
    local = whole.chunk(2)[rank % 2]
    sharded = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(sharded))
    TorchState(model=model).save(folder, context(rank=rank, world_size=4))


@pytest.mark.process
def test_replicated_and_uneven_shards_are_written_once_without_a_word_between_ranks(tmp_path: Path) -> None:
    """Replicated along one mesh dimension, split 2 + 1 rows along the other, each rank alone: whole, and each piece is there once."""
    whole = torch.randn(3, 4)
    folder = tmp_path / "step-000000001"
    for rank in range(4):  # in turn, each in a process of its own: DTensor caches which rank it is
        process = multiprocessing.get_context("fork").Process(target=_save_alone, args=(folder, whole, rank))
        process.start()
        process.join(30)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0
    assert sealing.seal(folder)[0] is not None
    assert verify_sealed(folder, "full")[0].problems == ()
    rows = [entry.shape[0] for rank in range(4) for key, entry in entries(folder, rank, 4) if key.startswith("model.")]
    assert rows == [2, 1]
    fresh = nn.Module()
    fresh.register_parameter("weight", nn.Parameter(torch.zeros(3, 4)))
    TorchState(model=fresh).load(folder)
    assert torch.equal(fresh.weight, whole)


# --- on disk


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", [layout.tensors_name(0, 1), layout.state_name(0, 1)])
@pytest.mark.parametrize("damage", [_flip, lambda path: os.truncate(path, path.stat().st_size - 1), Path.unlink])
def test_any_damage_to_what_was_written_is_seen(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    """A flipped bit, one byte less, a missing file: WHOLE before, TORN after."""
    folder = saved(tmp_path / "step-000000001", model=nn.Linear(8, 8))
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"
    damage(folder / name)
    assert verify_sealed(folder, "full")[0].verdict == "TORN"


def test_a_real_limit_of_the_kernel_leaves_the_older_checkpoint_and_no_debris(tmp_path: Path) -> None:
    """RLIMIT_FSIZE refuses the file: CheckpointError, nothing of the save is left, the older one is whole."""
    older = saved(tmp_path / "step-000000001", model=nn.Linear(2, 2))
    state = TorchState(model=nn.Linear(256, 256))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot save step 2 to .*: File too large"):
            state.save(tmp_path / "step-000000002", context(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["step-000000001"]
    assert verify_sealed(older, "full")[0].verdict == "WHOLE"


def test_too_little_space_leaves_not_even_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty step folder would be taken for a torn checkpoint."""

    class Tight:
        f_bavail, f_frsize, f_files, f_favail = 1, 4096, 10, 10

    monkeypatch.setattr(os, "statvfs", lambda _: Tight)
    with pytest.raises(CheckpointError, match="cannot save step 1 to"):
        TorchState(model=nn.Linear(2, 2)).save(tmp_path / "step-000000001", context())
    assert os.listdir(tmp_path) == []


def test_temporaries_of_a_killed_save_do_not_stay(tmp_path: Path) -> None:
    """They may be as large as the checkpoint; those of other ranks are left, they may be being written."""
    folder = tmp_path / "step-000000001"
    folder.mkdir()
    (folder / layout.writing_name(0, 1)).write_text("{}")
    own, other = f".tmp-{layout.tensors_name(0, 1)}.0a", f".tmp-{layout.tensors_name(1, 2)}.0a"
    for name in (own, other):
        (folder / name).write_bytes(b"x")
    saved(folder, model=nn.Linear(2, 2))
    assert not (folder / own).exists()
    assert (folder / other).exists()
    assert not (folder / layout.writing_name(0, 1)).exists()


def test_tensors_are_fetched_one_at_a_time_and_a_failing_fetch_leaves_nothing(tmp_path: Path) -> None:
    """Of tensors on a device one copy at a time is in host memory: each is read once, when the one before has been written."""
    alive: list[str] = []

    def fetch(key: str) -> Callable[[], memoryview]:
        def read() -> memoryview:
            alive.append(key)
            if key == "c":
                raise RuntimeError("device lost")
            return memoryview(bytes(4))

        return read

    parts = [writing.Part(key, "F32", (1,), 4, fetch(key)) for key in "abc"]
    folder = tmp_path / "step-000000001"
    writing.write_rank(folder, context(), parts[:2], b"{}")
    assert alive == ["a", "b"]
    with pytest.raises(RuntimeError, match="device lost"):
        writing.write_rank(tmp_path / "step-000000002", context(2), parts, b"{}")
    assert os.listdir(tmp_path) == ["step-000000001"]
