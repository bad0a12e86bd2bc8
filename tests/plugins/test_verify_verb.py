"""The verbs `verify` and `checkpoints`: what they print, promise in JSON, and exit with."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kit.checkpoints import Saved, a_checkpoint, mark_writing, parts, payload
from supervise_daemon.cli.checkpoints import checkpoints
from supervise_daemon.cli.verify import verify
from supervise_hooks.contract.identity import identify

PROMISED = {"path", "format", "step", "verdict", "depth", "problems", "caveats"}


def run_verify(*args: object) -> Result:
    """`supervise verify ...`."""
    return CliRunner().invoke(verify, [str(arg) for arg in args])


def run_checkpoints(*args: object) -> Result:
    """`supervise checkpoints ...`."""
    return CliRunner().invoke(checkpoints, [str(arg) for arg in args])


def rows(result: Result) -> list[dict[str, Any]]:
    """The JSON array it printed."""
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def zero_payload(folder: Path) -> None:
    """Zeros where data was, size kept."""
    path = payload(folder)
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))


def test_verify_exits_0_for_whole_and_1_for_torn(tmp_path: Path) -> None:
    """The exit code answers a script; the text says what is wrong and where."""
    folder = a_checkpoint(tmp_path, 20)
    result = run_verify(folder)
    assert (result.exit_code, result.stdout.startswith("WHOLE")) == (0, True)
    payload(folder, rank=1).unlink()
    result = run_verify(folder)
    assert result.exit_code == 1
    assert "problem: rank-00001-of-00002.safetensors is missing" in result.stdout


def test_verify_full_finds_what_quick_cannot(tmp_path: Path) -> None:
    """Zeros of the right size: exit 0 quickly, 1 with --full; the depth is told."""
    folder = a_checkpoint(tmp_path, 20)
    zero_payload(folder)
    assert run_verify(folder).exit_code == 0
    result = run_verify(folder, "--full", "--json")
    assert (result.exit_code, rows(result)[0]["depth"]) == (1, "full")


def test_verify_takes_a_folder_of_checkpoints_and_several_paths(tmp_path: Path) -> None:
    """Each in it is judged, newest step first; one torn makes the exit code 1."""
    for step in (999, 1000):
        a_checkpoint(tmp_path / "a", step)
    a_checkpoint(tmp_path / "b", 5)
    result = run_verify(tmp_path / "a", tmp_path / "b", "--json")
    assert (result.exit_code, [row["step"] for row in rows(result)]) == (0, [1000, 999, 5])
    payload(tmp_path / "a" / "step-000000999").unlink()
    assert run_verify(tmp_path / "a", tmp_path / "b").exit_code == 1


def test_verify_json_is_what_was_promised(tmp_path: Path) -> None:
    """Field names and types of every row, whole, torn or unknown."""
    a_checkpoint(tmp_path, 20)
    payload(a_checkpoint(tmp_path, 30)).unlink()
    (tmp_path / "legacy-40.pt").write_bytes(b"\x80\x02.")
    found = rows(run_verify(tmp_path, "--json"))
    assert [row["verdict"] for row in found] == ["UNKNOWN", "TORN", "WHOLE"]
    for row in found:
        assert set(row) == PROMISED
        assert isinstance(row["problems"], list)
        assert isinstance(row["caveats"], list)


def test_verify_of_a_path_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """Exit 2 and the path by name, not a verdict."""
    result = run_verify(tmp_path / "gone")
    assert (result.exit_code, "gone" in result.output) == (2, True)
    assert run_verify().exit_code == 2


@pytest.mark.parametrize(
    ("make", "seen"), [("notes.txt", "ending in .txt"), ("empty/", "it holds nothing"), ("pipe", "no regular file")]
)
def test_verify_of_something_else_is_unknown_and_says_what_was_seen(tmp_path: Path, make: str, seen: str) -> None:
    """Nothing proves it: exit 1, with what it looks like; a pipe is not waited for."""
    path = tmp_path / make
    path.mkdir() if make.endswith("/") else os.mkfifo(path) if make == "pipe" else path.write_bytes(b"x")
    result = run_verify(path)
    assert (result.exit_code, result.stdout.startswith("UNKNOWN")) == (1, True)
    assert seen in result.stdout


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """Newlines, escape codes and bytes that are no UTF-8 are shown escaped; JSON stays valid."""
    raw = os.fsencode(tmp_path) + b"/x\n\x1b[31m\xff.pt"
    with open(raw, "wb") as file:
        file.write(b"x")
    path = os.fsdecode(raw)
    result = run_verify(path)
    assert "\x1b" not in result.stdout
    assert "x\\n\\x1b[31m" in result.stdout.splitlines()[0]
    assert "legacy" not in rows(run_verify(path, "--json"))[0]["path"]
    (tmp_path / "step-5 [bold]\n[red].pt").write_bytes(b"x")
    listed = run_checkpoints(tmp_path)
    assert (listed.exit_code, "step-5 [bold]\\n[red].pt" in listed.stdout) == (0, True)


def test_checkpoints_marks_the_one_that_resume_would_choose(tmp_path: Path) -> None:
    """Newest step first; exactly one row has `resume`, and it is the newest whole one of the run."""
    for step in (10, 20):
        a_checkpoint(tmp_path, step)
    payload(a_checkpoint(tmp_path, 30)).unlink()
    found = rows(run_checkpoints(tmp_path, "--json"))
    assert [(row["step"], row["resume"]) for row in found] == [(30, False), (20, True), (10, False)]
    assert set(found[0]) == PROMISED | {"resume"}


def test_checkpoints_says_why_newer_ones_were_passed_over(tmp_path: Path) -> None:
    """A table for people: torn, unfinished, being written and foreign are told apart, and the choice is named."""
    a_checkpoint(tmp_path, 10, Saved(reason="emergency"))
    payload(a_checkpoint(tmp_path, 20)).unlink()
    parts(tmp_path, 30, range(1))
    mark_writing(parts(tmp_path, 40, range(1)), 1, 2, identify())
    a_checkpoint(tmp_path, 5, Saved(run_id="old"))
    text = run_checkpoints(tmp_path).stdout
    for expected in ("emergency", "TORN", "being written", "1 of 2 ranks finished", "belongs to run 'old'"):
        assert expected in text
    assert f"a resume of run 'run-1' would start from: {tmp_path / 'step-000000010'}" in text
    assert "passed over step-000000040: it is being written" in text


def test_checkpoints_of_a_named_run(tmp_path: Path) -> None:
    """--run-id asks for another run than that of the newest."""
    a_checkpoint(tmp_path, 10)
    a_checkpoint(tmp_path, 700, Saved(run_id="old"))
    assert [row["step"] for row in rows(run_checkpoints(tmp_path, "--json")) if row["resume"]] == [700]
    assert [row["step"] for row in rows(run_checkpoints(tmp_path, "--json", "--run-id", "run-1")) if row["resume"]] == [10]


def test_checkpoints_full_sees_zeros(tmp_path: Path) -> None:
    """With --full the choice is the one that a resume makes."""
    a_checkpoint(tmp_path, 10)
    zero_payload(a_checkpoint(tmp_path, 20))
    chosen = {
        flag: [row["step"] for row in rows(run_checkpoints(tmp_path, "--json", *flag)) if row["resume"]]
        for flag in ((), ("--full",))
    }
    assert chosen == {(): [20], ("--full",): [10]}


def test_checkpoints_looks_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$SUPERVISE_CHECKPOINTS, else ./checkpoints; a folder that is not there is a usage error naming it."""
    a_checkpoint(tmp_path / "from-env", 10)
    a_checkpoint(tmp_path / "checkpoints", 20)
    monkeypatch.chdir(tmp_path)
    assert [row["step"] for row in rows(run_checkpoints("--json"))] == [20]
    monkeypatch.setenv("SUPERVISE_CHECKPOINTS", str(tmp_path / "from-env"))
    assert [row["step"] for row in rows(run_checkpoints("--json"))] == [10]
    result = run_checkpoints("gone")
    assert (result.exit_code, "gone does not exist" in result.output) == (2, True)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    """Not even what a start would seal or set aside."""
    parts(tmp_path, 20, range(2))
    zero_payload(a_checkpoint(tmp_path, 30))
    before = {(str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")}
    run_checkpoints(tmp_path, "--full")
    run_verify(tmp_path, "--full")
    assert {(str(path), path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")} == before


def test_the_help_lists_verdicts_and_examples_line_by_line() -> None:
    """A table in the help stays a table."""
    lines = [line.strip() for line in run_verify("--help").stdout.splitlines()]
    assert "TORN     something is missing or changed; every problem is listed" in lines
    assert "supervise verify checkpoints --full" in lines


@pytest.mark.process
def test_verify_as_a_command_imports_neither_torch_nor_rich(tmp_path: Path) -> None:
    """On a login node: the real command, exit code and all, with nothing heavy loaded for --json."""
    folder = a_checkpoint(tmp_path, 20)
    script = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr))\n"
        "from supervise_daemon.__main__ import main\n"
        "sys.argv[0] = 'supervise'; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(folder), "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, json.loads(done.stdout)[0]["verdict"]) == (0, "WHOLE")
    assert done.stderr.strip() == "[]"
