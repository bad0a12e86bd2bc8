"""The job of the drills: everything whose state is easy to lose, in a model small enough for 60 restarts.

DDP, dropout, BatchNorm, AdamW with a schedule, data workers with random augmentation, an evaluation phase. Each rank keeps a
page that says what it is doing right now (`phase.rank0`), and logs the samples of every finished step.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path

PHASES = Path(os.environ["DRILL_DIR"])
RANK = int(os.environ.get("RANK", "0"))
_page = os.open(PHASES / f"phase.rank{RANK}", os.O_WRONLY | os.O_CREAT, 0o600)


def phase(name: str) -> None:
    """Say what this rank is doing, for the attacker to see."""
    os.pwrite(_page, f"{name:<12}".encode(), 0)


phase("import")

import torch  # noqa: E402 - the import is one of the moments to be attacked
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

import supervise_hooks  # noqa: E402


class Samples(Dataset):  # type: ignore[type-arg]
    """Vectors that carry their own index; augmented at random in the worker."""

    def __len__(self) -> int:
        return 516  # not a multiple of the batch: the last batch of an epoch is short

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=generator)
        noise = torch.randn(16) * 0.1 + random.random() * 0.1
        return index, x + noise, x.sum().sign().long().clamp(min=0)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--eval-every", type=int, default=15)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument(
        "--own-folder", action="store_true", help="the script names the folder of checkpoints, supervise does not know it"
    )
    parser.add_argument("--eval-s", type=float, default=0.0, help="an evaluation that long, without a service point")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--fail-at", type=int, default=-1, help="rank 1 raises at this step, in every attempt")
    parser.add_argument("--exit-at", type=int, default=-1, help="rank 1 exits 7 at this step, in every attempt")
    parser.add_argument("--own-handlers", action="store_true", help="replace every handler by one that notes the signal")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    phase("setup")
    torch.manual_seed(7)
    random.seed(7 + RANK)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.999**step)
    sampler = DistributedSampler(Samples(), shuffle=True, seed=3)
    loader = DataLoader(Samples(), batch_size=8, sampler=sampler, num_workers=args.workers)
    held_out = DataLoader(Samples(), batch_size=64, num_workers=0)
    phase("resume")
    run = supervise_hooks.attach(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        every=args.every,
        checkpoints=PHASES / "drill-checkpoints" if args.own_folder else None,
        resume=args.resume,
        metric="min:loss",
    )
    if args.own_handlers:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda number, _: (PHASES / f"signal.rank{RANK}").write_text(str(number)))
    log = os.open(f"{args.out}.samples.rank{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    batches = run.batches()
    phase("first")
    for step in run.steps(args.steps):
        begun = time.monotonic()
        if step == args.fail_at and RANK == 1:
            raise ValueError("a bad batch")
        if step == args.exit_at and RANK == 1:
            sys.exit(7)
        consumed = []
        for _ in range(2):  # gradient accumulation
            ids, x, y = next(batches)
            loss = nn.functional.cross_entropy(model(x), y) / 2
            loss.backward()
            consumed += ids.tolist()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(max(0.0, args.step_s - (time.monotonic() - begun)))
        line = f"{step} lr={scheduler.get_last_lr()[0]!r} loss={loss.item()!r} ids={consumed}\n"
        os.write(log, line.encode())
        run.log(loss=loss.item())
        phase("train")
        if (step + 1) % args.eval_every == 0:
            with run.evaluating():
                phase("evaluate")
                time.sleep(args.eval_s)
                model.eval()
                for _, x, y in held_out:
                    model(x)
                    run.service_point()
                model.train()
            phase("train")
    digest = hashlib.sha256()
    for tensors in (model.state_dict(), *optimizer.state_dict()["state"].values()):
        for name, value in sorted(tensors.items()):
            digest.update(name.encode())
            digest.update(torch.as_tensor(value).numpy().tobytes())
    Path(f"{args.out}.digest.rank{RANK}").write_text(digest.hexdigest())
    phase("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
