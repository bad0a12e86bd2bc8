"""What holds for every test: it says what it shows, it leaves nothing behind, and in CI it is not skipped."""

import os
import re
import secrets
import time
from pathlib import Path

import psutil
import pytest

_SESSION = "SUPERVISE_TEST_SESSION"
_OURS_IN_TMP = re.compile(r"(supervise-|pymp-|torchelastic_)")
_before: dict[str, set[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Mark every process that descends from this session, and remember what lies around before it."""
    os.environ[_SESSION] = secrets.token_hex(8)
    # A developer's own run must not leak into the tests.
    for name in [name for name in os.environ if name.startswith("SUPERVISE_") and name != _SESSION]:
        del os.environ[name]
    _before["shm"], _before["tmp"] = _shm(), _tmp()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test says in one sentence what it shows."""
    mute = sorted({item.nodeid.split("[")[0] for item in items if isinstance(item, pytest.Function) and not (item.function.__doc__ or "").strip()})
    if mute:
        raise pytest.UsageError("tests without a docstring:\n  " + "\n  ".join(mute))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the session for anything left behind, and in CI for anything skipped."""
    problems = _leaks()
    if os.environ.get("CI"):
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        problems += [f"skipped in CI: {report.nodeid}: {report.longrepr}" for report in (reporter.stats.get("skipped", []) if reporter else [])]
    if problems:
        print("\n" + "\n".join(problems))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _leaks() -> list[str]:
    deadline = time.monotonic() + 5  # what is just ending may end
    while (left := _processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [
        *(f"left running: {line}" for line in left),
        *(f"left in /dev/shm: {name}" for name in sorted(_shm() - _before["shm"])),
        *(f"left in /tmp: {name}" for name in sorted(_tmp() - _before["tmp"])),
    ]


def _processes() -> list[str]:
    wanted = f"{_SESSION}={os.environ[_SESSION]}".encode()
    found = []
    for pid in psutil.pids():
        try:
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"pid {pid}: {' '.join(process.cmdline())[:160]}")
        except (OSError, psutil.Error):
            continue
    return found


def _shm() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _tmp() -> set[str]:
    return {name for name in os.listdir("/tmp") if _OURS_IN_TMP.match(name)}
