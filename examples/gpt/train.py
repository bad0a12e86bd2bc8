"""A small byte-level GPT, trained on the source files of Python's own standard library.

    python train.py
    torchrun --nproc-per-node 2 train.py
    supervise torchrun --nproc-per-node 2 train.py

Lines marked with `# supervise` are all that the script does to survive being interrupted.
"""

import argparse
import contextlib
import hashlib
import math
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import supervise_hooks  # supervise

CORPUS_BYTES = 3_000_000
EVALUATION_BATCHES = 20


class Windows(Dataset[tuple[int, Tensor]]):
    """Stretches of `context` + 1 bytes; with `jitter` each begins at a random place near its own."""

    def __init__(self, text: bytes, context: int, jitter: bool) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context
        self.jitter = jitter

    def __len__(self) -> int:
        return (len(self.text) - self.context - 1) // self.context

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        begin = index * self.context
        if self.jitter:
            begin += int(torch.randint(self.context, ()))
        return index, self.text[begin : begin + self.context + 1].long()


class Block(nn.Module):
    """Attention over what came before, then a two-layer network, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, context, width = hidden.shape
        heads = self.query_key_value(self.before_attention(hidden)).view(batch, context, 3 * self.heads, width // self.heads)
        query, key, value = heads.transpose(1, 2).chunk(3, dim=1)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, context, width))
        return hidden + self.network(self.before_network(hidden))


class GPT(nn.Module):
    """Loss of predicting each next byte of `tokens`, (batch, context + 1) integers."""

    def __init__(self, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes, self.places, self.dropout = nn.Embedding(256, width), nn.Embedding(context, width), nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads=4, dropout=dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        seen, wanted = tokens[:, :-1], tokens[:, 1:]
        places = self.places(torch.arange(seen.shape[1], device=tokens.device))
        logits = self.head(self.blocks(self.dropout(self.bytes(seen) + places)))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def read_corpus() -> tuple[bytes, bytes]:
    """Text to train on and text to evaluate on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES]
    cut = len(text) * 95 // 100
    return text[:cut], text[cut:]


def learning_rate(step: int, steps: int) -> float:
    """Factor of the peak rate: up in a straight line, down along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))


def evaluate(run: supervise_hooks.Session, model: nn.Module, loader: DataLoader[Any]) -> None:
    """Every rank evaluates the same text: with no collective inside, each can stop and save between any two batches."""
    with run.evaluating(), torch.no_grad():  # supervise
        model.eval()
        losses = []
        for _, tokens in loader:
            losses.append(float(model(tokens)))
            run.service_point()  # supervise
        model.train()
    loss = sum(losses) / len(losses)
    run.log(val_loss=loss)  # supervise
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {run.step:5d}  evaluation loss {loss:.4f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="of one rank, of one forward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="forward passes a step")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="data-loading processes of one rank")
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--checkpoints", help="folder; default: what supervise says, else ./checkpoints")
    parser.add_argument("--resume", metavar="PATH", help="checkpoint to go on from; supervise adds this by itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes at least so many seconds, for demonstrations")
    parser.add_argument("--sample-log", metavar="PATH", help="append the samples of each step to PATH.rank<r>")
    parser.add_argument("--weights", metavar="PATH", help="write a digest of the final model and optimizer to PATH")
    return parser.parse_args()


def log_samples(path: str, step: int, samples: list[int]) -> None:
    """One whole line in one write: a kill leaves no half line."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(log, f"{step} {' '.join(map(str, samples))}\n".encode())
    os.close(log)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The same for two trainings exactly when they ended alike, bit for bit."""
    hasher = hashlib.sha256()
    moments = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    for tensor in [*model.state_dict().values(), *moments]:
        hasher.update(tensor.cpu().numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    """Train."""
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + rank)

    training_text, evaluation_text = read_corpus()
    windows = Windows(training_text, args.context, jitter=True)
    sampler: DistributedSampler[Any] = DistributedSampler(windows, world, rank, seed=args.seed, drop_last=True)
    loader = DataLoader(windows, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    held_out = Windows(evaluation_text[: EVALUATION_BATCHES * args.batch_size * args.context + 1], args.context, jitter=False)
    evaluation_loader = DataLoader(held_out, args.batch_size)

    bare = GPT(args.layers, args.width, args.context)
    model = DistributedDataParallel(bare) if dist.is_initialized() else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))

    run = supervise_hooks.attach(  # supervise: from here on everything is as it was when the checkpoint was saved
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        checkpoints=args.checkpoints,
        every=args.save_every,
        metric="min:val_loss",
        resume=args.resume,
        config={name: value for name, value in vars(args).items() if name != "resume"},
    )
    if run.evaluation_interrupted:  # supervise
        evaluate(run, bare, evaluation_loader)
    batches = run.batches()  # supervise
    for step in run.steps(args.steps):  # supervise
        began = time.monotonic()
        samples: list[int] = []
        loss = torch.zeros(())
        for part in range(args.accumulate):
            indices, tokens = next(batches)
            samples += indices.tolist()
            last = part == args.accumulate - 1
            quiet = contextlib.nullcontext() if last or model is bare else model.no_sync()  # ranks exchange gradients once a step
            with quiet:
                part_loss = model(tokens) / args.accumulate
                part_loss.backward()
            loss += part_loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if args.sample_log:
            log_samples(f"{args.sample_log}.rank{rank}", step, samples)
        run.log(loss=loss, lr=scheduler.get_last_lr()[0])  # supervise
        time.sleep(max(0.0, args.step_s - (time.monotonic() - began)))
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
        if (step + 1) % args.eval_every == 0:
            evaluate(run, bare, evaluation_loader)

    if args.weights and rank == 0:
        Path(args.weights).write_text(digest(bare, optimizer) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
