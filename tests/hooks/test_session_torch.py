"""`attach` with real torch objects on two ranks: interrupted by SIGTERM and resumed, the weights are the uninterrupted run's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
import supervise_hooks

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
torch.manual_seed(100 + rank)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
data = torch.utils.data.TensorDataset(torch.arange(160.0).reshape(20, 8) / 160, torch.arange(20.0).reshape(20, 1) / 20)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
run = supervise_hooks.attach(model, optimizer, scheduler, loader, checkpoints=sys.argv[1], resume="auto", config={"lr": 1e-2})
batches = run.batches()
for step in run.steps(30):
    x, y = next(batches)
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log(loss=loss)
    if step == 11 and rank == 0 and not run.resumed:
        print("ready", flush=True)
    time.sleep(float(sys.argv[2]))
    if step % 10 == 9:
        with run.evaluating():
            torch.rand(step)
if rank == 0:
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print("digest", digest.hexdigest(), flush=True)
"""


def torchrun(folder: Path, pause_s: float) -> "subprocess.Popen[str]":
    """The script on two ranks."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--log-dir",
        str(folder),
        str(script),
    ]
    return subprocess.Popen(
        [*command, str(folder / "c"), str(pause_s)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Its digest line."""
    try:
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()[-1]


def test_a_preempted_run_ends_bit_identical(tmp_path: Path) -> None:
    """DDP, dropout, shuffled workers, Adam and a schedule: SIGTERM in the middle and a resume change no bit of the weights."""
    whole = finish(torchrun(tmp_path / "whole", 0.0))
    first = torchrun(tmp_path / "cut", 0.02)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        first.send_signal(signal.SIGTERM)
        _, err = first.communicate(timeout=40)
    finally:
        first.kill()
    saved = sorted(path.name for path in (tmp_path / "cut" / "c").glob("step-*/manifest.json"))
    assert saved, err
    assert not (tmp_path / "cut" / "c" / "step-000000030").exists(), "it was not interrupted"
    assert finish(torchrun(tmp_path / "cut", 0.0)) == whole
    assert whole.startswith("digest ")
