"""Launchers: which commands they know, what they make of them, what they read from real torchrun output."""

from pathlib import Path

import pytest

from supervise_daemon.core.restart import FailureReport
from supervise_daemon.launchers.command import CommandLauncher
from supervise_daemon.launchers.resume_argument import PRESETS, with_resume
from supervise_daemon.launchers.torchrun import TorchrunLauncher, parse_failures
from supervise_daemon.ports import LaunchContext

DATA = Path(__file__).parents[1] / "data"


def context(resume: str | None = None, grace_s: float = 30.0) -> LaunchContext:
    return LaunchContext(
        attempt=2, resume=resume, resume_argument=PRESETS["default"], attempt_dir=Path("/r/attempts/0002"), grace_s=grace_s
    )


@pytest.mark.parametrize(
    "argv, known",
    [
        (("torchrun", "t.py"), True),
        (("/opt/env/bin/torchrun", "t.py"), True),
        (("python", "-m", "torch.distributed.run", "t.py"), True),
        (("/usr/bin/python3.11", "-u", "-m", "torch.distributed.run", "t.py"), True),
        (("python3", "-m", "torch.distributed.launch", "t.py"), True),
        (("python", "t.py"), False),
        (("bash", "torchrun"), False),
        (("python", "t.py", "-m", "other"), False),
    ],
)
def test_torchrun_is_recognised_in_its_spellings(argv: tuple[str, ...], known: bool) -> None:
    """By program name or module, wherever it lies; nothing else is taken for it."""
    assert TorchrunLauncher().recognises(argv) is known
    assert CommandLauncher().recognises(argv)


SEEN = {
    "exit-77-rank-0": FailureReport(exit_code=77, rank=0),
    "sigkill-rank-0": FailureReport(exit_code=137, rank=0, error="killed by SIGKILL"),
    "sigsegv-rank-1": FailureReport(exit_code=139, rank=1, error="killed by SIGSEGV"),
    "valueerror": FailureReport(exit_code=1, rank=1),
    "valueerror-record": FailureReport(exit_code=1, rank=1, error="ValueError: the loss is not a number: 'nan'"),
}


@pytest.mark.parametrize("case", SEEN)
def test_root_cause_is_read_from_real_torchrun_output(case: str) -> None:
    """The first report is the rank that fell by itself, with its own code; the TERMed peer follows."""
    reports = parse_failures((DATA / f"torchrun-2.13-{case}.txt").read_text())
    assert reports[0] == SEEN[case]
    assert [report.error for report in reports[1:]] == ["killed by SIGTERM"]


def test_the_same_failure_looks_the_same_in_the_next_attempt() -> None:
    """Torchrun names pids; they are not part of what is compared between attempts."""
    text = (DATA / "torchrun-2.13-sigsegv-rank-1.txt").read_text()
    later = text.replace("31078", "9")
    assert later != text
    assert parse_failures(text)[0].signature == parse_failures(later)[0].signature


def test_the_last_summary_counts_and_no_summary_is_no_report() -> None:
    """An inner launcher may have printed one before; a cut-off tail gives nothing, not an error."""
    first, last = ((DATA / f"torchrun-2.13-{case}.txt").read_text() for case in ("exit-77-rank-0", "sigkill-rank-0"))
    assert parse_failures(first + last)[0].exit_code == 137
    assert parse_failures("") == ()
    assert parse_failures(last[: last.index("Root Cause")]) == ()


@pytest.mark.parametrize("words", [("--max-restarts=3",), ("--max-restarts", "3"), ("--max_restarts", "3")])
def test_max_restarts_is_taken_off_with_a_note(words: tuple[str, ...]) -> None:
    """Nested restarts would multiply (C62): the option goes, the user hears why, nothing else changes."""
    plan = TorchrunLauncher().plan(("torchrun", *words, "--nproc-per-node", "2", "t.py", "--max-restarts", "9"), context())
    assert plan.argv == ("torchrun", "--nproc-per-node", "2", "t.py", "--max-restarts", "9")
    assert len(plan.notes) == 1
    assert "--max-restarts=3" in plan.notes[0]


@pytest.mark.parametrize(
    "argv", [("torchrun", "t.py"), ("torchrun", "--max-restarts=0", "t.py"), ("torchrun", "t.py", "--max-restarts=2")]
)
def test_nothing_to_take_off_changes_nothing(argv: tuple[str, ...]) -> None:
    """No restarts asked of torchrun, or an option of the script: the words stay, no note."""
    plan = TorchrunLauncher().plan(argv, context())
    assert (plan.argv, plan.notes) == (argv, ())


def test_torchrun_waits_longer_than_the_grace_also_inside_a_wrapper() -> None:
    """Its shutdown timeout of 30 s must not cut a longer flush (F5), and its restarts are off by environment too."""
    for launcher in (TorchrunLauncher(), CommandLauncher()):
        env = launcher.plan(("torchrun", "t.py"), context(grace_s=120.0)).env
        assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 130
        assert env["PET_MAX_RESTARTS"] == "0"


@pytest.mark.parametrize(
    "argv, expected",
    [
        (("t.py",), ("t.py", "--resume", "/c/8")),
        (("t.py", "--resume", "/c/4", "--lr", "1"), ("t.py", "--lr", "1", "--resume", "/c/8")),
        (("t.py", "--resume=/c/4"), ("t.py", "--resume", "/c/8")),
        (("t.py", "--resume", "/c/2", "--resume=/c/4"), ("t.py", "--resume", "/c/8")),
        (("t.py", "--resume", "--lr", "1"), ("t.py", "--lr", "1", "--resume", "/c/8")),
        (("t.py", "--resume"), ("t.py", "--resume", "/c/8")),
        (("t.py", "--resume-from", "x"), ("t.py", "--resume-from", "x", "--resume", "/c/8")),
        (("t.py", "a b", "", "$(x)", "\n"), ("t.py", "a b", "", "$(x)", "\n", "--resume", "/c/8")),
    ],
)
def test_exactly_one_resume_argument(argv: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """Replaced, never appended twice (C73); a bare switch swallows no other option; other words are untouched (C72)."""
    once = with_resume(argv, PRESETS["default"], "/c/8")
    assert once == expected
    assert with_resume(once, PRESETS["default"], "/c/8") == expected


def test_templates_of_one_word_and_none() -> None:
    """`key={path}` replaces its own kind; no template or no checkpoint leaves the command alone."""
    assert with_resume(("t", "resume=/old", "x"), ("resume={path}",), "/new") == ("t", "x", "resume=/new")
    assert with_resume(("t", "--resume", "X"), PRESETS["none"], "/new") == ("t", "--resume", "X")
    assert with_resume(("t", "--resume", "X"), PRESETS["default"], None) == ("t", "--resume", "X")
