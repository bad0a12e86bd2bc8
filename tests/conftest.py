"""What holds for every test: it says what it shows, it leaves nothing behind, and in CI it is not skipped."""

import atexit
import os

import pytest

from kit.leaks import Watch

_WATCH = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the developer's own settings out of the tests, and begin to watch for leftovers."""
    for name in [name for name in os.environ if name.startswith("SUPERVISE_")]:
        del os.environ[name]
    watch = config.stash[_WATCH] = Watch()
    watch.begin()
    atexit.register(watch.end)  # after the session: what is left in its folder is still to be named then


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test says in one sentence what it shows."""
    functions = [item for item in items if isinstance(item, pytest.Function)]
    mute = sorted({item.nodeid.split("[")[0] for item in functions if not (item.function.__doc__ or "").strip()})
    if mute:
        raise pytest.UsageError("tests without a docstring:\n  " + "\n  ".join(mute))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the session for anything left behind, and in CI for anything skipped."""
    problems = session.config.stash[_WATCH].leaks()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None:
        problems += [f"skipped, which in CI is a failure: {report.nodeid}: {_why(report)}" for report in _skips(reporter)]
    if problems:
        if reporter is not None:
            reporter.write_line("\n" + "\n".join(problems), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skips(reporter: pytest.TerminalReporter) -> list[pytest.TestReport | pytest.CollectReport]:
    return list(reporter.stats.get("skipped", []))


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
