"""Kill anywhere: one training run, dozens of interruptions of every kind at every moment, and the numbers of a run without any."""

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.drill import Victim, effective_log, environment, send, sigkill, torchrun
from supervise_daemon.core.job import Phase

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.process]

STRIKES = 64
EARLY = ("import", "set-up", "resume", "first step", "verification")
STEPS = 900
TRAIN = ["--steps", str(STEPS), "--every", "12", "--eval-every", "15", "--step-s", "0.02", "--workers", "1"]


def _weapons(victim: Victim) -> dict[str, Callable[[], object]]:
    """What can happen to a run, by name."""

    def supervisor(number: int) -> bool:
        assert victim.process is not None
        victim.process.send_signal(number)
        return True

    def twice() -> bool:
        supervisor(signal.SIGTERM)
        return supervisor(signal.SIGTERM)

    return {
        "TERM": lambda: supervisor(signal.SIGTERM),
        "USR1": lambda: supervisor(signal.SIGUSR1),
        "TERM TERM": twice,
        "KILL torchrun": lambda: send(victim.leader(), signal.SIGKILL),
        "KILL rank 0": lambda: send(victim.ranks().get(0), signal.SIGKILL),
        "KILL rank 1": lambda: send(victim.ranks().get(1), signal.SIGKILL),
        "KILL all": lambda: sigkill(victim.tree()),
        "KILL supervise": lambda: supervisor(signal.SIGKILL),
        "KILL worker": lambda: sigkill(victim.workers()[:1]),
        "TERM tree": lambda: [supervisor(signal.SIGTERM), *(send(process, signal.SIGTERM) for process in victim.tree())],
    }


def _moments(victim: Victim, chance: random.Random) -> dict[str, Callable[[], bool]]:
    """When it happens, by name: each waits for its moment and says whether it came."""

    def in_phase(*phases: Phase) -> Callable[[], bool]:
        return lambda: (status := victim.status()) is not None and status.phase in phases

    def during(what: str) -> Callable[[], bool]:
        def wait() -> bool:
            came = victim.wait(lambda: in_phase(Phase.RUNNING)() and victim.doing() == what, 30)
            time.sleep(chance.random() * 0.05)
            return came

        return wait

    def flushing() -> bool:
        victim.wait(lambda: in_phase(Phase.RUNNING)() and victim.doing() == "train", 30)
        if victim.process is not None and victim.process.poll() is None:
            victim.process.send_signal(signal.SIGTERM)
        return victim.wait(lambda: in_phase(Phase.FLUSHING, Phase.STOPPING)() or victim.saving(), 10)

    def starting() -> bool:
        came = victim.wait(lambda: victim.leader() is not None, 20)
        time.sleep(chance.random() * 4)
        return came

    return {
        "import": lambda: victim.wait(lambda: len(victim.ranks()) == 2 and victim.doing() == "import", 20),
        "set-up": starting,
        "resume": lambda: victim.wait(lambda: victim.doing() == "resume", 20),
        "first step": during("first"),
        "mid-step": during("train"),
        "evaluation": during("evaluate"),
        "mid-save": lambda: victim.wait(victim.saving, 20),
        "mid-flush": flushing,
        "verification": lambda: victim.wait(in_phase(Phase.WAITING, Phase.SETTLING), 3),
    }


@pytest.mark.timeout(1200)
def test_any_interruption_at_any_moment_leaves_the_numbers_of_an_undisturbed_run(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """C34, C35, C37: after 64 random interruptions weights, optimizer, rates and consumed samples are those of an undisturbed run, to the bit."""
    subprocess.run(torchrun(tmp_path, "plain", *TRAIN), env=environment(tmp_path, "plain"), check=True, capture_output=True)

    chance = random.Random(20261130)
    victim = make_victim(tmp_path, TRAIN)
    weapons, moments = _weapons(victim), _moments(victim, chance)
    # Every weapon meets every moment sooner or later: shuffled rounds rather than independent draws.
    pairs = [(moment, weapon) for moment in moments for weapon in weapons]
    chance.shuffle(pairs)
    struck: list[tuple[str, str]] = []
    give_up = time.monotonic() + 700
    for moment, weapon in itertools.cycle(pairs):  # some moments are missed: their pair comes round again
        if len(struck) >= STRIKES or victim.finished or time.monotonic() > give_up:
            break
        victim.ensure()
        status = victim.status()
        if moment in EARLY and status is not None and status.phase == Phase.RUNNING and sigkill(victim.tree()):
            struck.append(("mid-step", "KILL all"))  # early moments come only after a restart
        if moments[moment]() and weapons[weapon]():
            struck.append((moment, weapon))
    deadline = time.monotonic() + 300
    while not victim.finished and time.monotonic() < deadline:
        victim.ensure()
        assert victim.process is not None
        victim.process.wait(timeout=200)
    log = victim.log.read_text(errors="replace")

    assert victim.finished, f"not finished after {struck}: exit codes {victim.exit_codes}\n{log[-6000:]}"
    assert len(struck) >= 60, f"only {len(struck)} interruptions struck before the end: {struck}"
    # The raw deaths: struck while the interpreter of `supervise` itself was still starting.
    assert set(victim.exit_codes) <= {75, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1}, victim.exit_codes
    for rank in (0, 1):
        plain, drill = (effective_log(tmp_path / f"{name}.samples.rank{rank}") for name in ("plain", "drill"))
        differing = next((index for index, (a, b) in enumerate(zip(plain, drill, strict=True)) if a != b), None)
        assert differing is None, f"rank {rank} first differs at:\n{plain[differing]}\n{drill[differing]}\n{log[-3000:]}"
        digests = [(tmp_path / f"{name}.digest.rank{rank}").read_text() for name in ("plain", "drill")]
        assert digests[0] == digests[1], f"weights of rank {rank} differ after {struck}"
    assert victim.tree() == []
