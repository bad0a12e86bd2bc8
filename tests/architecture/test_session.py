"""The test session itself: what it forbids is found when planted."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kit.eventually import eventually

TESTS = Path(__file__).parent.parent
BEGIN = """
import os, socket, subprocess, tempfile, time, warnings

def test_x():
    "x"
    warnings.simplefilter("ignore")
    """
FORK = """pid = os.fork()
    if not pid:
        os.fork() and os._exit(0)
        os.setsid()
        time.sleep(300)
    os.waitpid(pid, 0)"""


def _session(tmp_path: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A session of one file of tests under the repository's conftest."""
    (tmp_path / "test_planted.py").write_text(body)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS}\n")
    kept = {
        name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST", "PYTEST_DEBUG_TEMPROOT")
    }
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
            "-rs",
            "--basetemp",
            tmp_path / "base",
            tmp_path,
        ],
        env={**kept, "PYTHONPATH": str(TESTS), **environ},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.process
def test_a_clean_session_passes(tmp_path: Path) -> None:
    """Nothing left in its folder or running: nothing said; temporary files that a test removes again are no leftovers."""
    done = _session(tmp_path, 'import tempfile\ndef test_x():\n    "x"\n    tempfile.TemporaryFile().close()\n')
    assert done.returncode == 0, done.stdout
    assert "left" not in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("subprocess.Popen(['sleep', '300.5'], env={**os.environ}, start_new_session=True).returncode = 0", "sleep 300.5"),
        (FORK, "pytest"),
        ("tempfile.mkdtemp(prefix='pymp-x')", "left in TMPDIR: pymp-x"),
        ("tempfile.mkstemp(prefix='anything')", "left in TMPDIR: anything"),
        ("socket.socket(socket.AF_UNIX).bind(tempfile.gettempdir() + '/sock')", "left in TMPDIR: sock"),
        ("open(f'/dev/shm/planted-{os.getpid()}', 'w').close()", "/dev/shm/planted-"),
        ("open(f'/tmp/supervise-planted-{os.getpid()}', 'w').close()", "/tmp/supervise-planted-"),
    ],
    ids=["process", "forked orphan", "folder", "file", "socket", "shared memory", "tmp by name"],
)
def test_what_a_test_leaves_behind_fails_the_session(tmp_path: Path, body: str, named: str) -> None:
    """A passing test that leaves a process, a file, a socket or shared memory makes exit code 1, and the offender is named."""
    done = _session(tmp_path, BEGIN + body + "\n", LEAK_PATIENCE_S="0.5")
    leaked = [line for line in done.stdout.splitlines() if line.startswith("left")]
    for path in [Path(line.removeprefix("left: ")) for line in leaked if "planted" in line]:
        path.unlink()
    assert "1 passed" in done.stdout
    assert done.returncode == 1, done.stdout
    assert [line for line in leaked if named in line]
    for pid in [int(line.split()[3].rstrip(":")) for line in leaked if line.startswith("left running")]:
        eventually(lambda pid=pid: not psutil.pid_exists(pid), "the killed leftover to be gone")


@pytest.mark.process
def test_a_test_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """No docstring, no session: the offender is named."""
    done = _session(tmp_path, "def test_mute():\n    pass\n")
    assert done.returncode != 0
    assert "test_planted.py::test_mute" in done.stdout + done.stderr


@pytest.mark.process
def test_a_skip_is_a_failure_in_ci_only(tmp_path: Path) -> None:
    """With CI set a missing part of the machine is found out, elsewhere it is counted and shown."""
    body = "import pytest\n@pytest.mark.skip(reason='no such device')\ndef test_x():\n    'x'\n"
    assert _session(tmp_path, body).returncode == 0
    done = _session(tmp_path, body, CI="true")
    assert done.returncode == 1
    assert "in CI is a failure: test_planted.py::test_x: Skipped: no such device" in done.stdout
