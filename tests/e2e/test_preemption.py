"""The main job on real torchrun: a notice becomes one whole checkpoint at a common step, and nothing is lost or left."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.drill import Victim, send
from supervise_hooks.contract import layout
from supervise_hooks.contract.manifest import read_manifest
from supervise_hooks.contract.verification import verify_sealed

pytestmark = [pytest.mark.e2e, pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(180)]

TRAIN = ["--steps", "4000", "--every", "1000", "--eval-every", "100000", "--step-s", "0.02"]


def _assert_flushed(victim: Victim) -> None:
    """One emergency checkpoint of both ranks at the step they had reached; nothing lost, nothing left."""
    status = victim.status()
    assert status is not None
    folder = victim.work / "drill-checkpoints" / f"step-{status.newest_step or 0:09d}"
    inspection, manifest = verify_sealed(folder, "full")
    assert inspection.verdict == "WHOLE", inspection.problems
    assert manifest is not None
    assert (manifest.reason, manifest.world_size) == ("emergency", 2)
    done = [len((victim.work / f"drill.samples.rank{rank}").read_text().splitlines()) for rank in (0, 1)]
    assert done == [manifest.step, manifest.step], "steps were done that the checkpoint does not hold"
    assert status.lost_steps_total == 0
    assert victim.tree() == []


def _seen(victim: Victim, event: str) -> bool:
    return any(step["event"]["type"] == event for step in victim.events())


def test_a_term_to_supervise_is_flushed_before_torchrun_or_a_rank_sees_any_signal(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """C05: TERM at step N, with the ranks' handlers replaced by the script's: both save one step, exit 75, no rank got a signal."""
    victim = make_victim(tmp_path, [*TRAIN, "--own-handlers"])
    victim.start()
    victim.wait_training(20)
    assert victim.process is not None
    victim.process.send_signal(signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)
    assert list(tmp_path.glob("signal.rank*")) == []
    assert not _seen(victim, "RankTermed")


@pytest.mark.parametrize("trap", ["", "trap 'echo trapped' TERM; "], ids=["plain", "with a trap"])
def test_a_shell_between_supervise_and_torchrun_changes_nothing(
    tmp_path: Path, make_victim: Callable[..., Victim], trap: str
) -> None:
    """C02: `supervise bash wrap.sh` without exec, with or without a trap, flushes and leaves nothing running."""
    script = tmp_path / "wrap.sh"
    script.write_text(f'{trap}"$@"\nexit $?\n')
    victim = make_victim(tmp_path, TRAIN, wrap=["bash", str(script)])
    victim.start()
    victim.wait_training(20)
    assert victim.process is not None
    victim.process.send_signal(signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)


def test_a_signal_to_the_whole_process_group_reaches_only_supervise(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C08: TERM to the group, twice, as a terminal or a scheduler sends it: one flush, exit 75."""
    victim = make_victim(tmp_path, TRAIN)
    victim.start(own_group=True)
    victim.wait_training(20)
    assert victim.process is not None
    os.killpg(victim.process.pid, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(victim.process.pid, signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)
    assert not _seen(victim, "RankTermed")


def test_a_term_to_every_process_of_the_tree_still_flushes(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C13: a cgroup-wide TERM hits torchrun, ranks and data workers too; the checkpoint is complete all the same."""
    victim = make_victim(tmp_path, [*TRAIN, "--workers", "2"])
    victim.start()
    victim.wait_training(20)
    assert victim.process is not None
    for process in victim.tree():
        send(process, signal.SIGTERM)
    victim.process.send_signal(signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)


def test_supervise_as_pid_1_hears_the_signal_and_flushes(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C04: first process of a PID namespace, as in a container: TERM flushes, the namespace ends with exit code 75."""
    victim = make_victim(tmp_path, TRAIN)
    victim.start("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")
    victim.wait_training(20)
    assert victim.process is not None
    [inner] = (int(pid) for pid in Path(f"/proc/{victim.process.pid}/task/{victim.process.pid}/children").read_text().split())
    os.kill(inner, signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)


def test_only_torchrun_is_signalled_and_the_ranks_still_save(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C01: TERM sent past supervise, straight to torchrun, is taken for the notice it is."""
    victim = make_victim(tmp_path, TRAIN)
    victim.start()
    victim.wait_training(20)
    send(victim.leader(), signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)


def test_when_the_supervisor_is_killed_the_ranks_flush_and_the_next_one_goes_on(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """KILL of supervise: the ranks save and leave by themselves; a second supervise waits for that and resumes there."""
    victim = make_victim(tmp_path, [*TRAIN[:-4], "--eval-every", "100000", "--step-s", "0.02"])
    victim.start()
    victim.wait_training(20)
    assert victim.process is not None
    victim.process.kill()
    victim.process.wait()
    victim.start()
    status = victim.wait_training(25, attempt=2)

    assert status.attempt == 2
    assert status.resume is not None
    manifest = read_manifest(Path(status.resume))
    assert manifest.reason == "emergency"
    assert manifest.attempt == 1
    victim.process.send_signal(signal.SIGINT)
    assert victim.end() == 130
    assert victim.tree() == []


def test_ranks_told_to_continue_train_on_and_nobody_starts_beside_them(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """With --on-supervisor-death=continue training goes on; a second supervise refuses with 73 until that tree is gone."""
    victim = make_victim(tmp_path, TRAIN, ["--on-supervisor-death", "continue"])
    victim.start()
    victim.wait_training(10)
    assert victim.process is not None
    victim.process.kill()
    victim.process.wait()
    before = (tmp_path / "drill.samples.rank0").stat().st_size
    victim.start()
    assert victim.end() == 73
    assert victim.wait(lambda: (tmp_path / "drill.samples.rank0").stat().st_size > before, 10, patient=True) or (
        (tmp_path / "drill.samples.rank0").stat().st_size > before
    ), "training stood still"
    assert len(victim.ranks()) == 2
    for process in victim.tree():
        send(process, signal.SIGKILL)


def test_a_failure_comes_out_with_the_jobs_own_code_and_is_explained(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C49, C51: rank 1 raises at step 5 in each attempt: exit code 1, and status names rank, step, traceback and what was lost."""
    victim = make_victim(tmp_path, [*TRAIN, "--fail-at", "5"])
    victim.start()
    assert victim.end(90) == 1
    status = victim.status()
    assert status is not None
    assert status.failure is not None
    assert (status.failure.rank, status.failure.step) == (1, 5)
    assert "ValueError: a bad batch" in status.failure.traceback
    assert status.attempt == 2, "the same failure at the same step from a fresh start is not tried for ever"
    assert victim.tree() == []
    shown = subprocess.run(
        [victim.argv[0], "status", "drill", "--run-root", str(tmp_path / "runs")], capture_output=True, text=True, check=True
    )
    for text in ("FAILED, exit code 1", "rank 1 failed at step 5", "ValueError: a bad batch", "giving up"):
        assert text in shown.stdout


def test_an_exit_code_of_a_rank_is_not_flattened_by_torchrun(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """Torchrun turns every failure into 1; supervise exits with the 7 that the rank exited with."""
    victim = make_victim(tmp_path, [*TRAIN, "--exit-at", "3"], ["--max-crashes", "0"])
    victim.start()
    assert victim.end(60) == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_at_one_rank_alone_makes_all_ranks_save_the_same_step(
    tmp_path: Path, make_victim: Callable[..., Victim], rank: int
) -> None:
    """C16: only one rank is signalled; the agreement brings both to one step, and both leave."""
    victim = make_victim(tmp_path, TRAIN)
    victim.start()
    victim.wait_training(20)
    send(victim.ranks()[rank], signal.SIGTERM)

    assert victim.end() == 75
    _assert_flushed(victim)


def test_requests_at_any_moment_are_honoured_between_steps_only(tmp_path: Path, make_victim: Callable[..., Victim]) -> None:
    """C15: twenty flushes at random times, with accumulation and locks in the step: every checkpoint is of a finished optimizer step."""
    victim = make_victim(tmp_path, [*TRAIN, "--workers", "0"], ["--keep-last", "100"])
    victim.start()
    victim.wait_training(10)
    assert victim.process is not None
    for count in range(1, 21):
        time.sleep(random.Random(count).random() * 0.05)
        victim.process.send_signal(signal.SIGUSR2)
        assert victim.wait(
            lambda count=count: sum("going on" in step["reason"] for step in victim.events()) >= count, 20, patient=True
        ), f"flush {count} did not end"
    victim.process.send_signal(signal.SIGTERM)
    assert victim.end() == 75
    folders = sorted((tmp_path / "drill-checkpoints").glob("step-*"))
    assert len(folders) >= 15
    for folder in folders:
        inspection, manifest = verify_sealed(folder, "full")
        assert (inspection.verdict, inspection.problems) == ("WHOLE", ())
        assert manifest is not None
        for rank in (0, 1):
            record = json.loads((folder / layout.state_name(rank, 2)).read_text())
            assert record["objects"]["scheduler"]["last_epoch"] == manifest.step == record["step"]


def test_a_long_evaluation_that_never_looks_costs_its_steps_and_says_how_many(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """C14: no service point within the grace: ended in time, nothing torn chosen, the steps since the last checkpoint told as a number."""
    train = ["--steps", "4000", "--every", "10", "--eval-every", "25", "--step-s", "0.01", "--eval-s", "60"]
    victim = make_victim(tmp_path, train, ["--grace", "4"])
    victim.start()
    assert victim.wait(lambda: victim.doing(0) == victim.doing(1) == "evaluate", 40, patient=True)
    assert victim.process is not None
    begun = time.monotonic()
    victim.process.send_signal(signal.SIGTERM)

    assert victim.end() == 75
    assert time.monotonic() - begun < 5
    status = victim.status()
    assert status is not None
    assert (status.newest_step, status.lost_steps_total) == (20, 5)
    assert "did not fit" in victim.log.read_text(errors="replace")
    assert victim.tree() == []


def test_a_lost_run_directory_and_a_folder_that_only_the_script_names_lose_no_work(
    tmp_path: Path, make_victim: Callable[..., Victim]
) -> None:
    """C31: `.supervise` is gone, the folder of checkpoints is the script's own: the job resumes there, it does not start from scratch."""
    victim = make_victim(tmp_path, [*TRAIN, "--own-folder"])
    del victim.environ["SUPERVISE_CHECKPOINTS"]
    victim.start()
    victim.wait_training(20)
    assert victim.process is not None
    victim.process.send_signal(signal.SIGTERM)
    assert victim.end() == 75
    [saved] = (tmp_path / "drill-checkpoints").glob("step-*")
    shutil.rmtree(tmp_path / "runs")

    victim.start()
    status = victim.wait_training(21, attempt=2)
    assert status.resume == str(saved)
    assert "did not know this folder" in victim.log.read_text(errors="replace")
    victim.process.send_signal(signal.SIGINT)
    assert victim.end() == 130
