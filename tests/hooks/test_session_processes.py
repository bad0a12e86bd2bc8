"""Scripts in processes of their own: signals alone, leaving, crashes, a dead supervisor, and two ranks under torchrun."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from supervise_hooks.contract import messages
from supervise_hooks.contract.manifest import read_manifest
from supervise_hooks.testing import FakeSupervisor

pytestmark = pytest.mark.process

PREAMBLE = """
import os, signal, sys, time
from supervise_hooks.attaching import Wishes, _hook_exit, open_session
from supervise_hooks.testing import CountingState

state = CountingState()
run = open_session(state, Wishes(checkpoints=sys.argv[1], save_at_end=False), os.environ)
_hook_exit(run)
"""

LOOP = """
for step in run.steps(10**9):
    state.train()
    if step == 3:
        print("ready", flush=True)
    time.sleep(0.001)
"""


def start(folder: Path, script: str, environ: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """A Python process that runs preamble and `script`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SUPERVISE_")}
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), str(folder)],
        env=clean | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(process: "subprocess.Popen[str]") -> None:
    """Wait for its "ready" line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()


def only_manifest(folder: Path) -> str:
    """Reason of the one checkpoint there is."""
    (checkpoint,) = folder.glob("step-*")
    return read_manifest(checkpoint).reason


@pytest.mark.parametrize("count", [1, 2])
def test_alone_term_saves_and_leaves_with_75(tmp_path: Path, count: int) -> None:
    """Without a supervisor SIGTERM saves a sealed emergency checkpoint and the exit code says "run me again"; so do two."""
    process = start(tmp_path, LOOP)
    ready(process)
    for _ in range(count):
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert only_manifest(tmp_path) == "emergency"


def test_alone_term_in_setup_leaves_at_once(tmp_path: Path) -> None:
    """Before the first step there is nothing to save: the process leaves although its main thread is busy."""
    process = start(tmp_path, 'print("ready", flush=True)\ntime.sleep(60)')
    ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75 and not list(tmp_path.iterdir())


def test_alone_usr1_is_a_notice_under_slurm_only(tmp_path: Path) -> None:
    """Under Slurm SIGUSR1 is the early warning and saves; elsewhere it is the script's own business."""
    process = start(tmp_path, LOOP, {"SLURM_JOB_ID": "1"})
    ready(process)
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 75 and only_manifest(tmp_path) == "emergency"


def test_a_handler_of_the_script_does_not_keep_the_save_away(tmp_path: Path) -> None:
    """A script that replaces the SIGTERM handler after attach still saves: the byte is written below Python's handlers."""
    process = start(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: None)\n" + LOOP)
    ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 75 and only_manifest(tmp_path) == "emergency"


def test_a_term_to_a_forked_child_is_not_ours(tmp_path: Path) -> None:
    """A forked child that is terminated dies of it, and its parent goes on training."""
    script = """
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    for step in run.steps(200):
        state.train()
        time.sleep(0.001)
    print(os.waitstatus_to_exitcode(status), run.step, flush=True)
    """
    process = start(tmp_path, script)
    out, err = process.communicate(timeout=20)
    assert out.split() == ["-15", "200"], err
    assert process.returncode == 0


def test_supervised_term_is_news_only(tmp_path: Path) -> None:
    """A stray SIGTERM is reported and training goes on; the flush saves; the order to leave ends the process with 0."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, LOOP, boss.env())
        ready(process)
        process.send_signal(signal.SIGTERM)
        boss.wait_for(messages.StrayTerm)
        boss.wait_step(max(m.step for _, m in boss.received if isinstance(m, messages.Progress)) + 1)
        asked = boss.ask_flush("leave")
        saved = boss.wait_for(messages.Saved)
        assert process.poll() is None
        boss.leave()
        process.communicate(timeout=20)
        assert process.returncode == 0 and saved.flush_id == asked
        assert not any(isinstance(m, messages.RunCompleted) for _, m in boss.received)


def test_leave_reaches_a_stuck_main_thread(tmp_path: Path) -> None:
    """The order to leave is obeyed at once though the main thread never comes back to the loop."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, 'for step in run.steps(9):\n    print("ready", flush=True)\n    time.sleep(60)', boss.env())
        ready(process)
        boss.leave()
        process.communicate(timeout=20)
        assert process.returncode == 0


def test_a_dead_supervisor_makes_the_rank_save_and_leave(tmp_path: Path) -> None:
    """By default a rank whose supervisor vanished saves, seals and ends."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, LOOP, boss.env())
        ready(process)
        boss.die()
        process.communicate(timeout=20)
        assert process.returncode == 0 and only_manifest(tmp_path) == "emergency"


def test_a_dead_supervisor_may_be_survived(tmp_path: Path) -> None:
    """With the policy `continue` training goes on alone, and SIGTERM is then the order it is for a script alone."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, LOOP, boss.env(SUPERVISE_ON_SUPERVISOR_DEATH="continue"))
        ready(process)
        boss.die()
        assert process.stderr is not None
        while "goes on alone" not in (line := process.stderr.readline()):
            assert line, "the process ended"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        assert process.returncode == 75 and only_manifest(tmp_path) == "emergency"


def test_an_exception_is_told_with_its_traceback(tmp_path: Path) -> None:
    """The supervisor learns what ended the script, and not that the run completed."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, "for step in run.steps(9):\n    state.train()\nraise ValueError('late')", boss.env())
        _, err = process.communicate(timeout=20)
        failed = boss.wait_for(messages.Failed)
        boss.wait_gone()
        assert process.returncode == 1 and "ValueError: late" in err
        assert failed.error == "ValueError: late" and "Traceback" in failed.traceback
        assert not any(isinstance(m, messages.RunCompleted) for _, m in boss.received)


def test_completion_is_told(tmp_path: Path) -> None:
    """A loop that ran to its end says so when the script ends."""
    with FakeSupervisor(tmp_path) as boss:
        process = start(tmp_path, "for step in run.steps(9):\n    state.train()", boss.env())
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert boss.wait_for(messages.RunCompleted).step == 9


def test_importing_is_free_of_torch_and_effects() -> None:
    """`import supervise_hooks` loads no torch, starts no thread and touches no signal."""
    script = """
    import signal, sys, threading
    before = signal.getsignal(signal.SIGTERM), sys.excepthook
    import supervise_hooks, supervise_hooks.testing
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    assert threading.active_count() == 1
    assert before == (signal.getsignal(signal.SIGTERM), sys.excepthook)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=20)


# --- two ranks

TOY = (
    PREAMBLE.replace("state = ", "import torch.distributed as dist\ndist.init_process_group('gloo')\nimport torch\nstate = ")
    + """
rank = dist.get_rank()
tensor = torch.zeros(1)
for step in run.steps(10**9):
    state.train()
    dist.all_reduce(tensor)  # couples the ranks
    time.sleep(0.005 if rank else 0.001)
    if step == 5 and rank == 0:
        print("ready", flush=True)
"""
)


def torchrun(tmp_path: Path, environ: dict[str, str]) -> "subprocess.Popen[str]":
    """The toy on two ranks."""
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--log-dir",
        str(tmp_path),
        str(script),
    ]
    return subprocess.Popen(
        [*command, str(tmp_path / "c")],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.torch
@pytest.mark.parametrize("warned", [0, 1])
def test_one_warned_rank_is_enough(tmp_path: Path, warned: int) -> None:
    """Of two coupled ranks one hears of the flush; both save the same step, one seal is written, torchrun ends with 0."""
    with FakeSupervisor(tmp_path / "c") as boss:
        process = torchrun(tmp_path, boss.env())
        try:
            boss.wait_for(messages.Hello, rank=0, timeout_s=50)
            boss.wait_for(messages.Hello, rank=1, timeout_s=50)
            boss.wait_step(5, timeout_s=30)
            asked = boss.ask_flush("leave", rank=warned)
            committed = boss.wait_for(messages.Committed, rank=warned)
            saved = [boss.wait_for(messages.Saved, rank=rank) for rank in (0, 1)]
            boss.leave()
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 0, err
        assert committed.step == saved[0].step == saved[1].step and committed.flush_id == asked
        assert read_manifest(Path(saved[0].path)).world_size == 2
        assert len(list((tmp_path / "c").glob("step-*"))) == 1


@pytest.mark.torch
def test_two_ranks_alone_save_on_term(tmp_path: Path) -> None:
    """Without a supervisor torchrun's own SIGTERM makes both ranks save one common, sealed step before they leave."""
    process = torchrun(tmp_path, {})
    try:
        ready(process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=40)
    finally:
        process.kill()
    assert only_manifest(tmp_path / "c") == "emergency", err
