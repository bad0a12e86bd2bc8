"""The house keeps its rules, and each rule would notice if it did not."""

import subprocess
import sys
from collections.abc import Callable

import pytest
from architecture import rules

ALLOWED_SLEEPS = {
    "supervise_daemon.cli.logs": "follows a file for a person",
    "supervise_hooks.channel": "lets the last words out, bounded, when the process is ending",
    "supervise_hooks.leaving": "gives the daemon its moment, bounded, when the process is ending",
    "supervise_hooks.testing": "the fake supervisor is a test's own",
    "supervise_hooks.saving": "waits, bounded, for its peers' receipts at the very end",
}
MAX_LINES = 450
LARGE: dict[str, str] = {}
"""Modules allowed over the limit, with the reason."""


def test_imports_keep_to_the_rules_of_the_design() -> None:
    """No product module imports what design section 3 refuses it."""
    assert [problem for module, text in rules.sources() for problem in rules.forbidden_imports(module, text)] == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("supervise_daemon.core.machine", "import time"),
        ("supervise_daemon.core.machine", "from supervise_daemon.runtime import tree"),
        ("supervise_daemon.runtime.loop", "from supervise_daemon.launchers.torchrun import TorchrunLauncher"),
        ("supervise_daemon.launchers.torchrun", "import supervise_daemon.notices.file"),
        ("supervise_daemon.formats.sealed", "import torch"),
        ("supervise_daemon.runtime.loop", "from supervise_hooks.session import Session"),
        ("supervise_hooks.session", "import torch"),
        ("supervise_hooks.session", "from supervise_hooks.integrations import torch"),
        ("supervise_hooks.session", "import supervise_daemon.config"),
        ("supervise_hooks.contract.manifest", "from supervise_hooks.state import Loaded"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    """Each import rule finds its planted offender."""
    assert rules.forbidden_imports(module, text)


@pytest.mark.parametrize(
    ("rule", "offender"),
    [
        (rules.undurable_writes, "open('x', 'w')"),
        (rules.undurable_writes, "Path('x').write_text('y')"),
        (rules.sleeps, "import time\ntime.sleep(1)"),
    ],
)
def test_a_planted_offender_is_found(rule: Callable[[str, str], list[str]], offender: str) -> None:
    """Each rule over source text finds its planted offender."""
    assert rule("supervise_daemon.core.machine", offender)


def test_files_are_written_only_durably() -> None:
    """Every product write goes through contract.durable."""
    assert [problem for module, text in rules.sources() for problem in rules.undurable_writes(module, text)] == []


def test_product_code_does_not_sleep_outside_the_runtime() -> None:
    """Nothing sleeps but the runtime's workers and the exceptions listed with a reason."""
    found = [
        problem
        for module, text in rules.sources()
        if not module.startswith("supervise_daemon.runtime") and module not in ALLOWED_SLEEPS
        for problem in rules.sleeps(module, text)
    ]
    assert found == []


def test_modules_stay_readable_in_size() -> None:
    """No module is longer than 450 lines, and none is called utils."""
    long = {module: text.count("\n") for module, text in rules.sources() if text.count("\n") > MAX_LINES and module not in LARGE}
    assert long == {}
    assert [problem for module, text in rules.sources() for problem in rules.bad_names(module, text)] == []
    assert rules.bad_names("supervise_daemon.utils", "")


@pytest.mark.process
def test_the_supervisor_never_loads_torch_numpy_or_rich() -> None:
    """After the composition root is imported, none of the heavy libraries is in sys.modules."""
    code = "import sys, supervise_daemon.assembly, supervise_daemon.cli.run; print([m for m in ('torch', 'numpy', 'rich', 'yaml', 'watchdog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_importing_the_hooks_loads_no_torch() -> None:
    """`import supervise_hooks` has no torch, no threads and no signal handlers in it."""
    code = (
        "import signal, sys, threading; before = signal.getsignal(signal.SIGTERM); import supervise_hooks; "
        "print('torch' in sys.modules, threading.active_count(), signal.getsignal(signal.SIGTERM) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1", "True"]
