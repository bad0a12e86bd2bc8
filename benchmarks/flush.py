"""An emergency flush against what else could write the same bytes: raw write + fsync, torch.save, safetensors, DCP.

State: parameters and Adam moments, 512 MB of float32. Every writer ends durable (files and folder fsynced), digests included in ours.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from measure import Result, interleave, median_ratio, timed
from supervise_hooks.integrations.torch import TorchState
from supervise_hooks.state import SaveContext

TENSORS, ELEMENTS, ROUNDS = 16, 2_800_000, 5
BLOCK = 16 << 20


def measure(folder: Path) -> list[Result]:
    """Ratio: their time / ours, paired by round."""
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.randn(ELEMENTS) for _ in range(TENSORS)])
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    state = TorchState(model=model, optimizer=optimizer)
    flat = {f"p{index}": parameter.detach() for index, parameter in enumerate(model)}
    for index, values in optimizer.state_dict()["state"].items():
        flat |= {f"s{index}.{key}": value for key, value in values.items()}
    size = sum(tensor.nbytes for tensor in flat.values())
    subjects = _subjects(folder / "flush", state, flat)
    for write in subjects.values():
        write()  # fresh blocks are slow once
    seconds = interleave(subjects, ROUNDS)
    ours = seconds.pop("supervise")
    targets = {"raw write + fsync": 0.9, "torch.save + fsync": 1.0, "safetensors + fsync": 1.0, "DCP (no_dist) + fsync": 1.0}
    return [
        Result(
            name=f"flush against {name}",
            ratio=median_ratio(theirs, ours),
            target=targets[name],
            measured=f"{size / sorted(ours)[ROUNDS // 2] / 1e9:.2f} GB/s against {size / sorted(theirs)[ROUNDS // 2] / 1e9:.2f} GB/s, {size / 1e6:.0f} MB",
        )
        for name, theirs in seconds.items()
    ]


def _subjects(folder: Path, state: TorchState, flat: dict[str, torch.Tensor]) -> dict[str, Callable[[], float]]:
    steps = iter(range(10**6))

    def in_fresh_folder(write: Callable[[Path], object]) -> Callable[[], float]:
        def run() -> float:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            os.sync()
            return timed(lambda: write(folder))

        return run

    def supervise(where: Path) -> None:
        context = SaveContext(run_id="bench", attempt=1, rank=0, world_size=1, step=next(steps), epoch=None, reason="emergency")
        state.save(where / "step", context)

    def raw(where: Path) -> None:
        fd = os.open(where / "raw", os.O_WRONLY | os.O_CREAT)
        for tensor in flat.values():
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(view), BLOCK):
                os.write(fd, view[start : start + BLOCK])
        os.fsync(fd)
        os.close(fd)
        _sync(where)

    def torch_save(where: Path) -> None:
        torch.save(flat, where / "x.pt")
        _sync(where)

    def safetensors(where: Path) -> None:
        save_file(flat, where / "x.safetensors")
        _sync(where)

    def distributed(where: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no_dist means one process
            dcp.save(dict(flat), checkpoint_id=where / "dcp", no_dist=True)
        _sync(where)
        _sync(where / "dcp")

    return {
        "supervise": in_fresh_folder(supervise),
        "raw write + fsync": in_fresh_folder(raw),
        "torch.save + fsync": in_fresh_folder(torch_save),
        "safetensors + fsync": in_fresh_folder(safetensors),
        "DCP (no_dist) + fsync": in_fresh_folder(distributed),
    }


def _sync(folder: Path) -> None:
    """Make a folder and its files durable."""
    for path in [*(entry for entry in folder.iterdir() if entry.is_file()), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
