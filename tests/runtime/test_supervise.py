"""`supervise` from end to end on plain commands and on a rank that speaks the contract without torch."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from kit.eventually import eventually
from kit.supervised import PYTHON, TOY, Supervised

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "command, code",
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("no-such-command-anywhere",), 127),
    ],
)
def test_the_jobs_own_exit_code_comes_out(run: Supervised, command: tuple[str, ...], code: int) -> None:
    """Success, its own code, 128+n of a signal, 127 for a command that is not there."""
    run.start("--max-crashes", "0", "--", *command)
    assert run.end()[0] == code
    status = run.status()
    assert status is not None
    assert (status.exit_code, status.phase) == (code, "ENDED")


def test_usage_errors_are_2_and_write_nothing(run: Supervised) -> None:
    """A wrong signal name, an unknown option, no command: refused before anything is made."""
    for words in (["--signal", "SIGFOO", "true"], ["--no-such", "true"], ["--"], []):
        run.start(*words)
        assert run.end()[0] == 2, words
    assert not run.run.exists()


def test_term_to_a_rank_with_hooks_flushes_verifies_and_leaves_75(run: Supervised) -> None:
    """The whole loop: notice, flush, seal, verify, leave; the next start goes on at that step, then completes."""
    run.toy()
    run.reach("RUNNING", step=3)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    code, out = run.end()
    assert code == 75, out
    status = run.status()
    assert status is not None
    assert (status.outcome, status.preemptions, status.crashes, status.lost_steps_total) == ("REQUEUED", 1, 0, 0)
    assert (run.folder / "c" / f"step-{status.newest_step:09d}" / "manifest.json").exists()
    assert run.survivors() == []
    run.toy(TOY_STEPS=str((status.newest_step or 0) + 5))
    code, out = run.end()
    assert code == 0, out
    first, second = run.attempts()
    assert (first["resume"], second["attempt"], second["step"]) == ("", 2, status.newest_step)
    assert second["argv"] == ["--resume", second["resume"]]


def test_argv_is_byte_identical_in_every_attempt_with_one_resume_argument(run: Supervised) -> None:
    """C72 and C73: odd words through two preemptions; nothing is executed; the user's own --resume is replaced."""
    words = ("a b", "x=(1,2)", f"$(touch {run.folder}/pwned)", ";true", "", "new\nline", "-", "ünï", "--resume", "mine")
    run.toy("--requeue", "local", "--relaunch-delay", "0", words=words)
    assert run.process is not None
    for attempt in (1, 2):
        run.reach("RUNNING", step=3, attempt=attempt)
        run.process.send_signal(signal.SIGTERM)
    run.reach("RUNNING", step=3, attempt=3)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    first, second, third = run.attempts()
    assert first["argv"] == list(words)
    for later in (second, third):
        assert later["argv"] == [*words[:-2], "--resume", later["resume"]]
    assert second["resume"] != third["resume"]
    assert not (run.folder / "pwned").exists()


def test_a_second_term_and_a_term_to_the_whole_group_do_no_harm(run: Supervised) -> None:
    """C09: one flush, it completes; the job is in a session of its own and never sees the group's signal."""
    run.toy("--grace", "20")
    run.reach("RUNNING", step=3)
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGTERM)
    os.killpg(run.process.pid, signal.SIGTERM)
    code, out = run.end()
    assert code == 75, out
    asked = [command for step in run.journal() for command in step["commands"] if command["type"] == "AskFlush"]
    assert {command["flush_id"] for command in asked} == {1}
    assert run.survivors() == []


def test_a_shell_in_between_changes_nothing(run: Supervised) -> None:
    """C02: bash without exec, with and without a trap: the rank is asked on its socket all the same."""
    for number, trap in enumerate(("", "trap 'true' TERM")):
        (run.folder / "wrap.sh").write_text(f"{trap}\n{PYTHON} {TOY}\necho after\n")
        run.start("--checkpoints", "c", "--", "bash", "wrap.sh", env={"TOY_LOG": str(run.folder / "log")})
        run.reach("RUNNING", step=3, attempt=number + 1)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        code, out = run.end()
        assert code == 75, out
        assert run.survivors() == []


def test_a_job_without_hooks_gets_the_term_and_its_time(run: Supervised) -> None:
    """Once it is known that nobody attaches, the SIGTERM is passed on; what saves itself by a handler still can."""
    (run.folder / "job.sh").write_text("trap 'echo saved > saved; exit 0' TERM\necho up > up\nwhile :; do sleep 0.1; done\n")
    run.start("--attach-timeout", "0.3", "--", "bash", "job.sh")
    run.reach("RUNNING")
    eventually((run.folder / "up").exists, "the job's trap")
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75
    assert (run.folder / "saved").exists()


def test_ignored_signals_are_absorbed_and_nohup_is_obeyed(run: Supervised) -> None:
    """`--signal USR1=ignore` must not leave the default action in place, which would end us; nor a HUP under nohup (C07)."""
    run.start("--signal", "USR1=ignore", "--checkpoints", "c", "--", PYTHON, str(TOY), prefix=("nohup",))
    run.reach("RUNNING", step=3)
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR1)
    run.process.send_signal(signal.SIGHUP)
    here = run.reach("RUNNING").step or 0
    run.reach("RUNNING", step=here + 3)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75
    assert [step["event"]["source"] for step in run.journal() if step["event"]["type"] == "NoticeArrived"] == ["SIGTERM"]


def test_pauses_grow_and_a_notice_is_honoured_during_one(run: Supervised) -> None:
    """C52: crashes are relaunched with growing pauses; TERM in a pause ends it at once with 75."""
    run.start(
        "--backoff-first",
        "0.1",
        "--attach-timeout",
        "0.01",
        "--max-crashes",
        "6",
        "--",
        "sh",
        "-c",
        "sleep 0.1; exit $SUPERVISE_ATTEMPT",
    )

    def pauses() -> list[float]:
        """From each end of an attempt to the relaunch timer armed there."""
        return [
            round(float(step["reason"].partition("launching again in ")[2].partition(" s")[0]), 1)
            for step in run.journal()
            if step["event"]["type"] == "Settled"
        ]

    eventually(lambda: len(pauses()) >= 4, "four pauses")
    seen = pauses()
    assert seen == sorted(seen)
    assert seen[3] >= 4 * seen[0]
    assert run.reach("WAITING", attempt=4).crashes >= 4
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.end(10)[0] == 75


def test_the_crash_budget_ends_the_job_with_its_own_code(run: Supervised) -> None:
    """Two crashes are allowed; the third ends it, and status keeps rank, traceback and step."""
    run.toy("--max-crashes", "2", "--backoff-first", "0.01", TOY_CRASH_AT="4")
    code, out = run.end()
    assert code in (1, 9), out
    status = run.status()
    assert status is not None
    assert status.failure is not None
    assert (status.outcome, status.failure.rank, status.failure.step) == ("FAILED", 0, 3)
    assert "ValueError: toy" in status.failure.traceback
    text = run.verb("status", "run").stdout
    assert "ValueError: toy" in text
    assert "FAILED" in text


def test_a_second_supervisor_of_the_same_run_is_refused_by_name(run: Supervised) -> None:
    """73, and the message says who owns it; the first goes on."""
    run.toy()
    status = run.reach("RUNNING", step=1)
    other = run.verb("run", "--name", "run", "true")
    assert other.returncode == 73
    assert f"pid {status.supervisor.pid}" in other.stderr
    run.reach("RUNNING", step=(status.step or 0) + 3)
    stopped = run.verb("stop", "run")
    assert stopped.returncode == 0, stopped.stderr
    assert run.end()[0] == 0


def test_a_killed_supervisor_is_shown_as_gone_and_the_next_takes_over(run: Supervised) -> None:
    """C59, C80: kill -9; status says so; the next start waits for or ends the old tree, then goes on as attempt 2."""
    run.start("--", "sh", "-c", "setsid sleep 300 & sleep 300", env={})
    run.reach("STARTING")
    eventually(lambda: len(run.survivors()) >= 3, "the tree")
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    assert "supervisor is gone" in run.verb("status", "run").stdout
    assert len(run.survivors()) >= 3
    run.start("--wait-for-old", "0.2", "--", "sh", "-c", 'test "$SUPERVISE_ATTEMPT" = 2')
    code, out = run.end()
    assert code == 0, out
    assert run.survivors() == []


def test_continue_refuses_to_start_beside_the_old_tree(run: Supervised) -> None:
    """Ranks told to go on without a supervisor are left alone: 73, naming them."""
    run.start("--on-supervisor-death", "continue", "--", "sleep", "300")
    status = eventually(lambda: (found := run.status()) and found.phase == "STARTING" and run.survivors() and found, "the job")
    assert status
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    run.start("--", "true")
    code, out = run.end()
    assert code == 73, out
    assert str(run.survivors()[0]) in out


def test_no_process_of_the_attempt_survives_a_stop(run: Supervised) -> None:
    """F4: children in sessions of their own, TERM-proof, orphaned: all are gone before we are."""
    each = "setsid sh -c 'trap \"\" TERM; (setsid sleep 300 &) ; sleep 300' &"
    job = f"trap '' TERM; for i in 1 2 3; do {each} done; touch up; wait; sleep 300"
    run.start("--grace", "1", "--", "sh", "-c", job)
    eventually((run.folder / "up").exists, "the job")
    eventually(lambda: len(run.survivors()) >= 7, "the tree")
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.end(20)[0] == 130
    assert run.survivors() == []


def test_secrets_are_not_written(run: Supervised) -> None:
    """C78: values of the environment never, secret options masked, files with words of the command for the owner only."""
    run.start("--", "sh", "-c", "exit 0", "--token", "s3cr3t2", "--api-key=s3cr3t3", env={"API_KEY": "s3cr3t1"})
    assert run.end()[0] == 0
    files = [path for path in run.run.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert b"s3cr3t" not in path.read_bytes(), path
        assert path.stat().st_mode & 0o077 == 0, path
    assert "s3cr3t" not in run.verb("status", "run", "--json").stdout
    assert "s3cr3t" not in run.verb("run", "--dry-run", "--", "x", "--password", "s3cr3t4").stdout


def test_dry_run_tells_the_plan_and_writes_nothing(run: Supervised) -> None:
    """Launcher, notices, grace, resume, requeue; the folder stays as it was."""
    before = sorted(run.folder.rglob("*"))
    plan = run.verb("run", "--dry-run", "--grace", "2m", "--", "torchrun", "--max-restarts=2", "t.py")
    assert plan.returncode == 0, plan.stderr
    for word in ("torchrun", "120 s", "SIGTERM", "fresh start", "75", "--max-restarts=2 is taken off"):
        assert word in plan.stdout, word
    assert [path for path in sorted(run.folder.rglob("*")) if path.name != "rt"] == [path for path in before if path.name != "rt"]


def test_verbs_for_programs_have_stable_shapes(run: Supervised) -> None:
    """`ps --json` is an array and `status --json` an object, with the names a script relies on; `logs` is the output."""
    run.start("--", "sh", "-c", "echo out; echo err >&2")
    assert run.end()[0] == 0
    (listed,) = json.loads(run.verb("ps", "--json").stdout)
    shown = json.loads(run.verb("status", "--json").stdout)
    assert listed == shown
    assert {"name", "phase", "attempt", "outcome", "exit_code", "reason", "next", "ranks", "live", "failure"} <= shown.keys()
    assert (shown["live"], shown["outcome"], shown["exit_code"]) == (False, "SUCCEEDED", 0)
    assert sorted(run.verb("logs", "run").stdout.split()) == ["err", "out"]
    assert run.verb("logs", "run", "--attempt", "7").returncode == 2
    assert run.verb("status", "nobody").returncode == 2
    assert run.verb("flush", "run").returncode == 1
    (run.folder / ".supervise" / "bad").mkdir()
    (run.folder / ".supervise" / "bad" / "status.json").write_text("{")
    assert json.loads(run.verb("ps", "--json").stdout) == [listed]


def test_flush_and_preempt_by_verb(run: Supervised) -> None:
    """`flush` saves and goes on; `preempt` rehearses a notice, and returns when the next attempt is there."""
    run.toy("--requeue", "local", "--relaunch-delay", "0")
    run.reach("RUNNING", step=3)
    flushed = run.verb("flush", "run")
    assert flushed.returncode == 0, flushed.stdout + flushed.stderr
    assert "verified" in flushed.stdout
    status = run.reach("RUNNING")
    assert (status.attempt, status.newest_step is not None) == (1, True)
    rehearsed = run.verb("preempt", "run")
    assert rehearsed.returncode == 0, rehearsed.stdout + rehearsed.stderr
    assert run.reach("RUNNING", attempt=2).preemptions == 1
    assert run.verb("stop", "run").returncode == 0
    assert run.end()[0] == 0


def test_detach_goes_to_the_background(run: Supervised) -> None:
    """The command returns at once; the run is found by its name, and ends by verb."""
    started = run.verb("run", "--detach", "--name", "run", "--", "sleep", "300")
    assert started.returncode == 0
    assert "supervise status run" in started.stdout
    status = run.reach("STARTING")
    stopped = run.verb("stop", "run", "--grace", "1")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    eventually(lambda: not Path(f"/proc/{status.supervisor.pid}").exists(), "the supervisor's end")
    assert run.survivors() == []


def test_closed_stdout_does_not_mix_output_into_other_files(run: Supervised) -> None:
    """Started with stdin, stdout and stderr closed, our pipes must not take their numbers."""
    run.start("--", "sh", "-c", "echo once; exit 3", "x", prefix=("sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"))
    assert run.end()[0] != 0
    assert (run.run / "attempts" / "0001" / "output.log").read_text() == "once\n"


@pytest.mark.parametrize("seed", range(20))
def test_a_term_at_any_early_moment_leaves_one_record_and_nobody(run: Supervised, seed: int) -> None:
    """C06: from the first child on, exactly one final record and no survivors; before our handlers, a raw death is all."""
    run.start("--", "sleep", "300")
    assert run.process is not None
    delay = random.Random(seed).uniform(0, 0.4)
    try:
        run.process.wait(delay)
    except subprocess.TimeoutExpired:
        run.process.send_signal(signal.SIGTERM)
    code, out = run.end(20)
    assert code in (75, -signal.SIGTERM), out
    ended = [step for step in run.journal() if step["phase"] == "ENDED"]
    assert len(ended) == (1 if code == 75 else 0)
    if code != 75:
        assert run.journal() == [], "it had begun, so it had to end with a record"
    assert run.survivors() == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root for a PID namespace")
def test_as_pid_1_it_hears_term_and_reaps_orphans(run: Supervised) -> None:
    """C04, C10: first process of a container: 200 adopted orphans leave no zombie, the job's code is its own, TERM works."""
    job = """
import os, time
for _ in range(200):
    child = os.fork()
    if child == 0:
        os._exit(5 if os.fork() == 0 else 6)
    os.waitpid(child, 0)
open("up", "w").close()
time.sleep(300)
"""
    (run.folder / "job.py").write_text(job)
    run.start("--grace", "5", "--", PYTHON, "job.py", prefix=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    eventually((run.folder / "up").exists, "the orphans")
    assert run.process is not None
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    inner = int(children[0])

    def zombies() -> list[str]:
        below = Path(f"/proc/{inner}/task/{inner}/children").read_text().split()
        return [pid for pid in below if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"]

    eventually(lambda: not zombies(), "all orphans reaped", 5)
    os.kill(inner, signal.SIGTERM)
    assert run.end(20)[0] == 75
