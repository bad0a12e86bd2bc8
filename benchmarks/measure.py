"""What every benchmark shares: a result, the conditions of the run, interleaved rounds."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One figure. `ratio` and `target`: more is better, the target is the least that passes."""

    name: str
    ratio: float
    target: float
    measured: str
    """For people: the figures behind the ratio."""
    conditions: dict[str, str] = {}

    @property
    def passed(self) -> bool:
        """Whether the budget is kept."""
        return self.ratio >= self.target


def conditions(folder: Path) -> dict[str, str]:
    """Where and when this ran."""
    memory_kib = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    filesystem = max(
        (line.split() for line in Path("/proc/mounts").read_text().splitlines() if str(folder).startswith(line.split()[1])),
        key=lambda fields: len(fields[1]),
    )
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": str(os.cpu_count()),
        "memory": f"{int(memory_kib) >> 20} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": f"{filesystem[2]} on {filesystem[0]}",
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def interleave(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each subject, in turn, `rounds` times; the order turns round so that none is always first."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    names = list(subjects)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds[name].append(subjects[name]())
    return seconds


def median_ratio(theirs: list[float], ours: list[float]) -> float:
    """Median over rounds of their time / our time: paired, so that drift of the machine cancels."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def timed(work: Callable[[], object]) -> float:
    """Seconds one call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
