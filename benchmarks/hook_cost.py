"""What the hooks add to each step: `for step in run.steps(n)` against `for step in range(n)`. Budget: 1 us, no syscalls."""

import statistics
import time
from pathlib import Path

import torch

import supervise_hooks
from measure import Result, interleave

STEPS = 200_000


def measure(folder: Path) -> list[Result]:
    """Alone, with a periodic save scheduled that never comes due."""
    model = torch.nn.Linear(2, 2)
    run = supervise_hooks.attach(model=model, checkpoints=folder / "hook-cost", every=10**9, save_at_end=False)
    begun_at = run.step

    def hooked() -> float:
        begun = time.perf_counter()
        for _ in run.steps(run.step + STEPS):
            pass
        return time.perf_counter() - begun

    def plain() -> float:
        begun = time.perf_counter()
        for _ in range(STEPS):
            pass
        return time.perf_counter() - begun

    seconds = interleave({"plain": plain, "hooked": hooked}, rounds=5)
    assert run.step == begun_at + 5 * STEPS, "the hooked loop did not run"
    run.close()
    cost_us = statistics.median(b - a for a, b in zip(seconds["plain"], seconds["hooked"], strict=True)) / STEPS * 1e6
    return [Result(name="hook cost per step", ratio=1.0 / cost_us, target=1.0, measured=f"{cost_us:.3f} us a step (budget 1 us)")]
