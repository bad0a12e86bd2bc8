"""The PyTorch training state: everything comes back bit for bit, or one error says what does not fit."""

import collections
import copy
import datetime
import errno
import json
import math
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from supervise_hooks import writing
from supervise_hooks.contract import layout, sealing
from supervise_hooks.contract.errors import CheckpointError, SuperviseError
from supervise_hooks.contract.verification import verify_sealed
from supervise_hooks.integrations.codec import Encoder, decode
from supervise_hooks.integrations.dcp import assign_owners
from supervise_hooks.integrations.raw import DTYPE_NAMES, from_buffer, to_buffer
from supervise_hooks.integrations.torch import TorchState
from supervise_hooks.state import SaveContext

pytestmark = pytest.mark.torch


def context(step: int = 1, rank: int = 0, world_size: int = 1, **fields: Any) -> SaveContext:
    """A save of attempt 1."""
    return SaveContext(run_id="r", attempt=1, rank=rank, world_size=world_size, step=step, epoch=0, reason="periodic", **fields)


def net() -> nn.Module:
    """A model with parameters, buffers, tied weights and a frozen part."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4, bias=False), nn.Linear(4, 4))
    model[4].weight = nn.Parameter(torch.eye(4), requires_grad=False)
    model[3].register_parameter("tied", model[0].weight)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """A few real steps."""
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(a: Any, b: Any) -> bool:
    """Bitwise equality of nested state, types included."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and bytes(to_buffer(a)) == bytes(to_buffer(b))
        )
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and (a == b or a != a)


def test_a_whole_training_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Model, optimizer, scheduler, scaler, an EMA, modes and random state: saved, sealed, whole, loaded into fresh objects, equal."""

    def objects() -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}], lr=1e-3, amsgrad=True
        )
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=50),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
            "objects": {"ema": torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))},
        }

    torch.manual_seed(3)
    random.seed(4)
    here = objects()
    train(here["model"], here["optimizer"])
    here["scheduler"].step()
    here["model"][2].eval()
    state = TorchState(**here)
    folder = tmp_path / layout.step_name(3)
    state.save(folder, context(3, values={"loss": 0.5}, config={"lr": 1e-3, "name": "x"}))
    assert sealing.seal(folder)[0] is not None
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"
    expected = (torch.rand(3), random.random(), np.random.rand())

    torch.manual_seed(99)
    there = objects()
    loaded = TorchState(**there)
    record = loaded.load(folder)
    loaded.restore_rng()
    assert (record.step, record.values, record.config) == (3, {"loss": 0.5}, {"lr": 1e-3, "name": "x"})
    for name in ("model", "optimizer", "scheduler", "scaler"):
        assert equal(here[name].state_dict(), there[name].state_dict()), name
    assert equal(here["objects"]["ema"].state_dict(), there["objects"]["ema"].state_dict())
    assert [module.training for module in there["model"].modules()] == [module.training for module in here["model"].modules()]
    assert equal(expected, (torch.rand(3), random.random(), np.random.rand()))
    before = copy.deepcopy(here["model"].state_dict())
    train(there["model"], there["optimizer"])
    assert equal(before, here["model"].state_dict()), "restored state shares memory with somebody"


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "LBFGS", "Adagrad", "RMSprop"])
def test_training_goes_on_identically_after_a_restore(tmp_path: Path, optimizer: str) -> None:
    """Three steps, save, three more; a restored copy does the same three with the same result, for optimizers of every kind of state."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3)
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)

    def step(model: nn.Module, one: torch.optim.Optimizer) -> None:
        x = torch.randn(4, 3)

        def closure() -> float:
            one.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return float(loss.detach())

        one.step(closure)

    torch.manual_seed(0)
    model, one = build()
    for _ in range(3):
        step(model, one)
    TorchState(model=model, optimizer=one).save(tmp_path / "step-000000003", context(3))
    sealing.seal(tmp_path / "step-000000003")
    for _ in range(3):
        step(model, one)
    other, two = build()
    state = TorchState(model=other, optimizer=two)
    state.load(tmp_path / "step-000000003")
    state.restore_rng()
    for _ in range(3):
        step(other, two)
    assert equal(model.state_dict(), other.state_dict())


def test_saving_before_the_first_step_does_not_step_the_optimizer(tmp_path: Path) -> None:
    """An optimizer without state yet is saved without being given any: its step count stays 0."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    TorchState(model=model, optimizer=optimizer).save(tmp_path / "step-000000000", context(0))
    assert optimizer.state == {}


def test_moments_of_low_precision_weights_keep_their_precision(tmp_path: Path) -> None:
    """fp32 state of a bf16 weight, which torch's own load_state_dict would cast, comes back as fp32."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.tensor([math.pi] * 3)
    TorchState(optimizer=optimizer).save(tmp_path / "step-000000001", context())
    sealing.seal(tmp_path / "step-000000001")
    fresh = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    other = torch.optim.SGD([fresh], lr=0.1, momentum=0.9)
    TorchState(optimizer=other).load(tmp_path / "step-000000001")
    assert equal(other.state[fresh]["momentum_buffer"], torch.tensor([math.pi] * 3))


def test_every_dtype_and_shape_survives_as_raw_bytes() -> None:
    """0-dim, empty, strided, conjugated, and each dtype that safetensors names."""
    for dtype, name in DTYPE_NAMES.items():
        for shape in ((), (0, 3), (2, 3)):
            tensor = torch.randint(0, 2, shape).to(dtype)
            back = from_buffer(bytearray(to_buffer(tensor)), name, shape)
            assert equal(tensor, back), (dtype, shape)
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert equal(strided.contiguous(), from_buffer(bytearray(to_buffer(strided)), "F32", (4, 3)))
    conjugated = torch.tensor([1 + 2j]).conj()
    assert equal(conjugated.resolve_conj(), from_buffer(bytearray(to_buffer(conjugated)), "C64", (1,)))


def test_two_ranks_split_replicated_tensors_and_share_nothing(tmp_path: Path) -> None:
    """Each large tensor is written by one rank only, evenly; both files together are whole and load anywhere."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    folder = tmp_path / "step-000000001"
    for rank in (0, 1):
        TorchState(model=model).save(folder, context(rank=rank, world_size=2))
        assert (sealing.seal(folder)[0] is not None) == (rank == 1)
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"
    sizes = [(folder / layout.tensors_name(rank, 2)).stat().st_size for rank in (0, 1)]
    assert max(sizes) < 0.6 * sum(sizes)
    other = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    notes = TorchState(model=other).load(folder).notes
    assert equal(model.state_dict(), other.state_dict())
    assert "saved by 2 ranks, loaded by 1" in notes[0]


def test_ownership_follows_from_names_and_shapes_alone() -> None:
    """Every rank computes the same owners; pinned tensors are rank 0's; the load is even."""
    named = {f"p{index}": torch.empty(index + 1) for index in range(40)}
    owners = assign_owners(named, frozenset({"p39"}), 4)
    assert owners == assign_owners(dict(reversed(named.items())), frozenset({"p39"}), 4)
    assert owners["p39"] == 0
    load = [sum(named[name].numel() for name, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(load) <= 1.1 * min(load)


def test_a_model_that_does_not_fit_is_one_error_and_nothing_is_changed(tmp_path: Path) -> None:
    """Missing, unexpected and reshaped keys, optimizer and objects are listed together; the live state is untouched."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1)).save(tmp_path / "step-000000001", context())
    sealing.seal(tmp_path / "step-000000001")
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    before = copy.deepcopy(other.state_dict())
    state = TorchState(model=other, scheduler=torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(other.parameters(), lr=1)))
    with pytest.raises(CheckpointError) as caught:
        state.load(tmp_path / "step-000000001")
    for text in (
        "2 missing: model.2.bias, model.2.weight",
        "2 unexpected: model.1.bias, model.1.weight",
        "model.0.weight is (4, 4)",
        "optimizer is in the checkpoint but",
        "scheduler is not in the checkpoint",
    ):
        assert text in str(caught.value)
    assert equal(before, other.state_dict())


def test_objects_that_cannot_be_saved_are_all_named_at_attach() -> None:
    """Every object without state_dict or load_state_dict, and every value without a safe form, is in one error."""
    with pytest.raises(SuperviseError, match=r"sampler \(list\) has no state_dict and no load_state_dict; tracker \(dict\)"):
        TorchState(objects={"sampler": [], "tracker": {}})

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"inner": {"callback": print}, "lock": object()}

        def load_state_dict(self, state: Any) -> None:
            """Never called."""

    with pytest.raises(
        SuperviseError, match=r"inner\.callback is a builtins\.builtin_function_or_method; .*lock is a builtins\.object"
    ):
        TorchState(objects={"odd": Odd()})
    with pytest.raises(SuperviseError, match="model is a str, not a Module"):
        TorchState(model="gpt2")


def test_batchnorm_statistics_of_each_rank_come_back_to_that_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DDP ranks differ in buffers until the next broadcast: each rank gets its own back, another world takes rank 0's."""
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    states = [TorchState(model=model) for model in models]
    for rank, model in enumerate(models):
        model(torch.randn(4, 2) + rank)
    folder = tmp_path / "step-000000001"
    for rank, state in enumerate(states):
        state.save(folder, context(rank=rank, world_size=2))
    sealing.seal(folder)
    for rank in (0, 1):
        monkeypatch.setattr("supervise_hooks.integrations.torch._rank_and_world", lambda rank=rank: (rank, 2))
        fresh = nn.BatchNorm1d(2)
        TorchState(model=fresh).load(folder)
        assert equal(fresh.state_dict(), models[rank].state_dict())
    monkeypatch.undo()
    alone = nn.BatchNorm1d(2)
    TorchState(model=alone).load(folder)
    assert equal(alone.state_dict(), models[0].state_dict())


def test_a_save_from_inside_an_evaluation_has_the_training_modes(tmp_path: Path) -> None:
    """The boundary was captured before the script called eval(): the resumed run trains in training mode, with that random state."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    state = TorchState(model=model)
    boundary = state.capture_rng()
    expected = torch.rand(2)
    model.eval()
    state.save(tmp_path / "step-000000001", context(rng=boundary))
    sealing.seal(tmp_path / "step-000000001")
    fresh = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)).eval()
    loaded = TorchState(model=fresh)
    loaded.load(tmp_path / "step-000000001")
    loaded.restore_rng()
    assert all(module.training for module in fresh.modules())
    assert equal(expected, torch.rand(2))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_leaves_the_older_checkpoint_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """C68: the error names the step; nothing of the failed save stays; what was there is still whole."""
    state = TorchState(model=nn.Linear(8, 8))
    state.save(tmp_path / "step-000000001", context(1))
    sealing.seal(tmp_path / "step-000000001")
    real = os.write

    def refuse(fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2].startswith(".tmp-") and len(data) > 100:
            raise OSError(number, os.strerror(number))
        return real(fd, data)

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(CheckpointError, match="cannot save step 2"):
        state.save(tmp_path / "step-000000002", context(2))
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["step-000000001"]
    assert verify_sealed(tmp_path / "step-000000001", "full")[0].verdict == "WHOLE"


def test_free_space_and_inodes_are_looked_at_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much is needed and how much is free."""

    class Tight:
        f_bavail, f_frsize, f_files, f_favail = 100, 4096, 10, 10

    monkeypatch.setattr(os, "statvfs", lambda _: Tight)
    with pytest.raises(CheckpointError, match=r"it needs 4\.2 MB and 0\.4 MB are free"):
        TorchState(model=nn.Linear(1024, 1024)).save(tmp_path / "step-000000001", context())
    monkeypatch.setattr(Tight, "f_bavail", 10**9)
    monkeypatch.setattr(Tight, "f_favail", 1)
    with pytest.raises(CheckpointError, match="no inodes are free"):
        TorchState(model=nn.Linear(2, 2)).save(tmp_path / "step-000000001", context())


def test_debris_of_a_killed_save_is_written_over_and_its_receipt_vouches_for_nothing(tmp_path: Path) -> None:
    """C17: files and a receipt of attempt 1 lie there; attempt 2 writes the same step; only attempt 2's receipts are sealed."""
    folder = tmp_path / "step-000000020"
    model = nn.Linear(4, 4)
    for rank in (0, 1):
        TorchState(model=model).save(folder, context(20, rank=rank, world_size=2))
    (folder / layout.writing_name(1, 2)).write_text("{}")
    with torch.no_grad():
        model.weight.zero_()
    second = SaveContext(run_id="r", attempt=2, rank=0, world_size=2, step=20, epoch=0, reason="periodic")
    TorchState(model=model).save(folder, second)
    manifest, why = sealing.seal(folder)
    assert manifest is None, "rank 1's part is of attempt 1"
    assert "attempt 2" in why


def test_loading_never_runs_what_a_checkpoint_hides(tmp_path: Path) -> None:
    """C76: pickles beside, inside and instead of our files are never executed; hostile tags in the state are refused."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "pwned"),))

    folder = tmp_path / "step-000000001"
    TorchState(model=nn.Linear(2, 2), objects={"s": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}).save(folder, context())
    sealing.seal(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    path = folder / layout.state_name(0, 1)
    record = json.loads(path.read_text())
    for content in ({"$path": ["x"]}, {"$dtype": "save"}, {"$ndarray": ["nothing", "O", [1]]}, {"$eval": "1"}, {"$bytes": "!"}):
        path.write_text(json.dumps(record | {"objects": {"s": content}}))
        with pytest.raises(CheckpointError):
            TorchState(model=nn.Linear(2, 2), objects={"s": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1)}).load(folder)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError):
        TorchState(model=nn.Linear(2, 2)).load(folder)
    assert not (tmp_path / "pwned").exists()


VALUES = {
    "plain": [None, True, 0, -1, 2**70, 0.1, -0.0, math.inf, -math.inf, "ü", "", b"\0\xff", bytearray(b"x"), 1 + 2j],
    "nested": {"a": (1, [2, {"b": ()}]), 3: "int key", (1, 2): "tuple key", None: 0, "$odd": 1, 2.5: 1},
    "containers": [{1, 2}, frozenset({"x"}), collections.OrderedDict(b=1, a=2), collections.Counter("aab"), torch.Size([2, 3])],
    "torch": [torch.arange(3), torch.float16, torch.device("cpu"), torch.tensor(1.5, dtype=torch.bfloat16)],
    "others": [Path("/x/y"), datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.timedelta(days=-1, microseconds=3)],
}


@pytest.mark.parametrize("name", VALUES)
def test_the_codec_gives_back_values_and_types(name: str) -> None:
    """Every supported type survives JSON, exactly."""
    encoder = Encoder("rank")
    text = json.dumps(encoder.encode(VALUES[name], ".x"), allow_nan=False)
    encoder.check("x")
    assert equal(VALUES[name], decode(json.loads(text), encoder.tensors))


def test_the_codec_keeps_numpy_and_deques() -> None:
    """Arrays of any numeric dtype, 0-dim ones, scalars, and a deque's bound."""
    values = [
        np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2],
        np.array(2.5),
        np.float32(0.1),
        collections.deque([1, 2], 2),
        float("nan"),
    ]
    encoder = Encoder("rank")
    back = decode(json.loads(json.dumps(encoder.encode(values, ".x"))), encoder.tensors)
    assert back[0].dtype == np.uint16
    assert back[0].tolist() == values[0].tolist()
    assert back[1].shape == ()
    assert (type(back[2]), back[2]) == (np.float32, np.float32(0.1))
    assert (back[3], back[3].maxlen) == (values[3], 2)
    assert math.isnan(back[4])


_SHARDED = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from supervise_hooks.contract import sealing
from supervise_hooks.integrations.torch import TorchState
from supervise_hooks.state import SaveContext
from pathlib import Path
folder, mode = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5 if mode == "save" else 6)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 1))  # one bias: ranks > 0 hold nothing of it
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = TorchState(model=model, optimizer=optimizer)
if mode == "save":
    for _ in range(2):
        model(torch.ones(2, 7)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    state.save(folder, SaveContext(run_id="r", attempt=1, rank=rank, world_size=world, step=2, epoch=None, reason="periodic"))
    sealing.seal(folder)
    dist.barrier(); sealing.seal(folder)
else:
    state.load(folder)
digest = torch.cat([t.full_tensor().flatten() for t in model.state_dict().values()] + [s["exp_avg"].full_tensor().flatten() for s in optimizer.state.values()])
if rank == 0:
    print("DIGEST", digest.double().sum().item().hex(), digest.numel(), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads can abort the interpreter's own teardown after DTensor collectives (torch 2.13)
"""


@pytest.mark.process
@pytest.mark.timeout(180)
def test_sharded_state_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    """FSDP2 state saved by 2 ranks is whole, and 1 and 3 ranks load the same weights and moments from it."""
    script = tmp_path / "sharded.py"
    script.write_text(_SHARDED)
    folder = tmp_path / "step-000000002"

    def run(ranks: int, mode: str) -> str:
        argv = [
            str(Path(sys.executable).parent / "torchrun"),
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            str(script),
            str(folder),
            mode,
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        done = subprocess.run(argv, capture_output=True, text=True, env=environ, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return next(line for line in done.stdout.splitlines() if line.startswith("DIGEST"))

    saved = run(2, "save")
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"
    assert run(1, "load") == saved
    assert run(3, "load") == saved
    # Without rank 1's file every sharded tensor has a hole, and that is seen without torch.
    (folder / layout.tensors_name(1, 2)).unlink()
    assert verify_sealed(folder, "quick")[0].verdict == "TORN"


def test_space_is_reserved_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that cannot reserve blocks is written to all the same; one that is full says so."""

    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with open(tmp_path / "x", "wb") as file:
        writing.allocate(file.fileno(), 10)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="No space left"):
        TorchState(model=nn.Linear(2, 2)).save(tmp_path / "step-000000001", context())


def test_ranks_with_different_plain_tensors_are_never_sealed(tmp_path: Path) -> None:
    """Pipeline stages, say: what a rank takes for everybody's is not; some tensors would be written by nobody, so there is no checkpoint."""
    folder = tmp_path / "step-000000001"
    TorchState(model=nn.Sequential(nn.Linear(2, 2))).save(folder, context(rank=0, world_size=2))
    TorchState(model=nn.Sequential(nn.ReLU(), nn.Linear(2, 2))).save(folder, context(rank=1, world_size=2))
    manifest, why = sealing.seal(folder)
    assert manifest is None
    assert "different plain tensors" in why
