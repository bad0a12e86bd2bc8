"""Public failure stories (shared/bug_cases.md) that need no torch, each as a test of its whole kind. Named after what it shows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.supervised import PYTHON, Supervised
from supervise_daemon.config import Settings, default_name, make_spec
from supervise_daemon.launchers.torchrun import TorchrunLauncher
from supervise_daemon.ports import LaunchContext

pytestmark = pytest.mark.process


@pytest.mark.parametrize("grace_s", [5.0, 120.0, 3600.0])
def test_torchrun_never_cuts_a_flush_off_before_the_grace_is_over(grace_s: float) -> None:
    """C12: torchrun's own 30 s, after which it kills its ranks, is stretched beyond the grace, and never shortened."""
    context = LaunchContext(attempt=1, resume=None, resume_argument=(), attempt_dir=Path("/x"), grace_s=grace_s)
    plan = TorchrunLauncher().plan(("torchrun", "train.py"), context)
    assert int(plan.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= max(30, grace_s)


@pytest.mark.parametrize(("save_s", "flushed"), [("0.5", True), ("2.5", True), ("3.8", False), ("30", False)])
def test_a_save_that_does_not_fit_is_given_up_early_enough_to_hand_the_job_back(
    run: Supervised, save_s: str, flushed: bool
) -> None:
    """C18: grace 4 s, saves of 0.5 to 30 s: in every case supervise is gone with 75 before the 4 s are over; late saves are no loss of time."""
    run.toy("--grace", "4", TOY_SAVE_S=save_s)
    run.reach("RUNNING", step=5)
    assert run.process is not None
    begun = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()
    took_s = time.monotonic() - begun

    assert code == 75
    assert took_s < 4.2, f"it took {took_s:.1f} s of 4"
    assert ("verified" in output) == flushed
    assert flushed or "did not fit" in output
    assert run.survivors() == []


def test_a_rank_that_cannot_answer_costs_no_more_than_the_grace_and_is_named(run: Supervised) -> None:
    """C20: a rank stuck in C code hears neither the flush nor the order to leave: killed in time, named, nothing torn chosen."""
    run.toy("--grace", "3", TOY_DEAF="1")
    run.reach("RUNNING", step=5)
    assert run.process is not None
    begun = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()

    assert code == 75
    assert time.monotonic() - begun < 3.5
    assert "still waiting for rank 0; no checkpoint exists" in output
    assert run.survivors() == []


def test_a_notice_of_an_earlier_attempt_never_stops_a_later_one(run: Supervised) -> None:
    """C19: preempted, and the supervisor killed before it could tidy up, three times: each new attempt trains on from there."""
    reached = 0
    for attempt in (1, 2, 3):
        run.toy("--grace", "10", "--wait-for-old", "5", TOY_SAVE_S="0.3")
        status = run.reach("RUNNING", step=reached + 10, attempt=attempt)
        assert status.step is not None
        reached = status.step
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        run.reach("FLUSHING", attempt=attempt)
        run.process.kill()
        run.process.wait()
    run.toy("--grace", "10", "--wait-for-old", "5")
    assert (run.reach("RUNNING", step=reached + 10, attempt=4).step or 0) > reached
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75
    steps = [entry["step"] for entry in run.attempts()]
    assert steps == sorted(steps)


def test_every_attempt_is_told_one_run_id_its_own_number_and_where_it_starts(run: Supervised) -> None:
    """C38: over four attempts the run id never changes, attempts count up, the resumed step is in the environment."""
    for attempt in (1, 2, 3, 4):
        run.toy("--grace", "10")
        run.reach("RUNNING", step=3, attempt=attempt)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 75
    entries = run.attempts()
    assert {entry["run_id"] for entry in entries} == {"run"}
    assert [entry["attempt"] for entry in entries] == [1, 2, 3, 4]
    assert entries[0]["resume"] == ""
    for entry in entries[1:]:
        assert f"{entry['step']:09d}" in entry["resume"]


def test_slurms_variables_alone_never_switch_anything_on(tmp_path: Path) -> None:
    """C74: in an interactive allocation, or with variables of a job long finished, only the run's name changes; nothing is requeued."""
    environ = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "bash"}
    spec = make_spec(("torchrun", "train.py"), Settings(), environ, tmp_path)
    assert (spec.name, spec.requeue) == ("slurm-77", "exit_code")
    array = {"SLURM_JOB_ID": "80", "SLURM_ARRAY_JOB_ID": "79", "SLURM_ARRAY_TASK_ID": "0"}
    assert default_name(("x",), array, tmp_path) == "slurm-79_0", "never the bare id, which is the whole array or its last task"


def test_a_job_without_hooks_is_told_so_at_the_start_not_at_the_preemption(run: Supervised) -> None:
    """C75: nothing in the script can save: said within the attach time, on stderr and in status."""
    run.start("--attach-timeout", "0.3", "--grace", "2", "--", PYTHON, "-c", "import time; time.sleep(60)")
    status = run.reach("RUNNING")
    assert "no rank has attached" in status.reason
    assert "without hooks" in status.next
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end()
    assert code == 75
    assert "add supervise_hooks.attach" in output
    assert "passing SIGTERM on" in output


def test_an_unreadable_resume_point_ends_a_rank_at_once_with_a_clear_error(tmp_path: Path) -> None:
    """C28: the choice is made once and handed over as one path; a rank that cannot see it fails, it does not choose another."""
    script = (
        "import torch, supervise_hooks; supervise_hooks.attach(model=torch.nn.Linear(1, 1), resume='/nowhere/step-000000020')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "/nowhere/step-000000020" in done.stderr.splitlines()[-1]
