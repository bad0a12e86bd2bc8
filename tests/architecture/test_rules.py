"""The house keeps its rules, and each rule would notice if it did not."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from architecture import rules

Rule = Callable[[str, str], list[str]]

EXCEPTIONS: dict[tuple[Rule, str], str] = {
    (rules.sleeps, "supervise_daemon.cli.logs"): "follows a file for a person",
    (rules.sleeps, "supervise_hooks.channel"): "lets the last words out, bounded, when the process is ending",
    (rules.sleeps, "supervise_hooks.testing"): "the fake supervisor is a test's own",
    (rules.sleeps, "supervise_hooks.saving"): "waits, bounded, for its peers' receipts at the very end",
    (rules.sleeps, "supervise_hooks.store"): "a thread of its own waits, bounded, for the store to come up",
    (rules.forbidden_imports, "supervise_daemon.config"): "checks the names of resume presets, a pure table of the launchers",
    (rules.undurable_writes, "supervise_hooks.writing"): "the mark of a live writer is worth nothing after a crash",
    (rules.undurable_writes, "supervise_daemon.formats.tending"): "renames a link as a link; syncs the folder itself",
}
"""(rule, module): the reason why it may. One that is needed no more is an error."""


def _found(rule: Rule) -> list[str]:
    return [problem for module, text in rules.sources() if (rule, module) not in EXCEPTIONS for problem in rule(module, text)]


def test_there_is_something_to_look_at() -> None:
    """The rules see both packages."""
    modules = {module for module, _ in rules.sources()}
    assert {"supervise_daemon.core.machine", "supervise_daemon.runtime.loop", "supervise_hooks.contract.durable"} <= modules
    assert len(modules) > 50


@pytest.mark.parametrize(
    "rule",
    [
        rules.forbidden_imports,
        rules.lazy_frameworks,
        rules.undurable_writes,
        rules.sleeps,
        rules.prints,
        rules.unpickles,
        rules.shells,
        rules.oversized,
        rules.bad_names,
    ],
)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    """No product module offends, but for the exceptions listed with a reason."""
    assert _found(rule) == []


@pytest.mark.parametrize(("rule", "module"), EXCEPTIONS)
def test_exceptions_are_needed(rule: Rule, module: str) -> None:
    """An exception for a module that is gone, or keeps the rule by now, goes too."""
    assert rule(module, dict(rules.sources()).get(module, ""))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("supervise_hooks.session", "import supervise_daemon.config"),
        ("supervise_hooks.contract.manifest", "import supervise_daemon"),
        ("supervise_daemon.runtime.loop", "from supervise_hooks.session import Session"),
        ("supervise_daemon.runtime.loop", "from supervise_hooks import Session"),
        ("supervise_hooks.contract.manifest", "from supervise_hooks.state import Loaded"),
        ("supervise_hooks.contract.manifest", "import psutil"),
        ("supervise_hooks.contract.manifest", "import anything_else"),
        ("supervise_hooks.contract.manifest", "def late():\n    import torch"),
        ("supervise_daemon.core.machine", "import time"),
        ("supervise_daemon.core.machine", "from datetime import datetime"),
        ("supervise_daemon.core.machine", "import os.path"),
        ("supervise_daemon.core.machine", "import psutil"),
        ("supervise_daemon.core.machine", "from supervise_daemon.runtime import tree"),
        ("supervise_daemon.core.machine", "from supervise_daemon import config"),
        ("supervise_daemon.core.machine", "from ..runtime import tree"),
        ("supervise_daemon.runtime.loop", "from supervise_daemon.launchers.torchrun import TorchrunLauncher"),
        ("supervise_daemon.runtime.loop", "from supervise_daemon import notices"),
        ("supervise_daemon.runtime.loop", "import supervise_daemon.assembly"),
        ("supervise_daemon.launchers.torchrun", "import supervise_daemon.notices.file"),
        ("supervise_daemon.notices.file", "from supervise_daemon.runtime.workers import Workers"),
        ("supervise_daemon.requeue.local", "from supervise_daemon.cli import app"),
        ("supervise_daemon.ports", "from supervise_daemon.runtime.loop import Loop"),
        ("supervise_daemon.cli.run", "from supervise_daemon.notices.file import FileNotice"),
        ("supervise_daemon.formats.sealed", "import torch"),
        ("supervise_daemon.assembly", "import numpy as np"),
        ("supervise_hooks.session", "import torch"),
        ("supervise_hooks.session", "from supervise_hooks.integrations import torch"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    """Each import rule finds its planted offender."""
    assert rules.forbidden_imports(module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("supervise_hooks.contract.manifest", "import os, msgspec\nfrom supervise_hooks.contract import durable"),
        ("supervise_daemon.core.machine", "import enum\nfrom supervise_hooks.contract.manifest import Metric"),
        ("supervise_daemon.assembly", "from supervise_daemon.launchers.torchrun import TorchrunLauncher"),
        ("supervise_hooks.integrations.torch", "import torch, numpy\nfrom supervise_hooks.integrations import rng"),
    ],
)
def test_what_the_design_allows_is_allowed(module: str, text: str) -> None:
    """The import rules do not refuse everything."""
    assert rules.forbidden_imports(module, text) == []


@pytest.mark.parametrize(
    ("rule", "module", "offender"),
    [
        (rules.lazy_frameworks, "supervise_hooks.integrations.torch", "def f():\n    import torch"),
        (
            rules.lazy_frameworks,
            "supervise_hooks.integrations.torch",
            "try:\n    from torch import nn\nexcept ImportError:\n    pass",
        ),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "open('x', 'w')"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "open(path, mode='ab')"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "path.open('w')"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "os.fdopen(fd, 'w')"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "Path('x').write_text('y')"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "os.replace(a, b)"),
        (rules.undurable_writes, "supervise_daemon.runtime.status", "shutil.copyfile(a, b)"),
        (rules.sleeps, "supervise_daemon.core.machine", "import time\ntime.sleep(1)"),
        (rules.sleeps, "supervise_daemon.core.machine", "from time import sleep\nsleep(1)"),
        (rules.prints, "supervise_daemon.runtime.loop", "print('here')"),
        (rules.unpickles, "supervise_daemon.formats.torch_file", "import pickle"),
        (rules.unpickles, "supervise_hooks.integrations.torch", "torch.load(path)"),
        (rules.unpickles, "supervise_hooks.integrations.torch", "torch.load(path, weights_only=False)"),
        (rules.unpickles, "supervise_hooks.session", "eval(text)"),
        (rules.shells, "supervise_daemon.requeue.local", "subprocess.run(words, shell=True)"),
        (rules.shells, "supervise_daemon.requeue.local", "os.system('x')"),
        (rules.oversized, "supervise_daemon.cli.run", "x = 1\n" * 451),
        (rules.bad_names, "supervise_daemon.utils", ""),
        (rules.bad_names, "supervise_daemon.runtime.manager", ""),
    ],
)
def test_a_planted_offender_is_found(rule: Rule, module: str, offender: str) -> None:
    """Each rule over source text finds its planted offender."""
    assert rule(module, offender)


@pytest.mark.parametrize(
    ("rule", "innocent"),
    [
        (
            rules.undurable_writes,
            "open(path, 'rb')\npath.open()\nos.open(path, os.O_WRONLY)\nself.open(epoch, 'warm')\ntext.replace(a, b)",
        ),
        (rules.sleeps, "clock.sleep\nevent.wait(1)"),
        (rules.unpickles, "torch.load(path, weights_only=True)\njson.load(file)"),
    ],
)
def test_innocent_text_is_left_alone(rule: Rule, innocent: str) -> None:
    """The rules do not cry at what only looks alike."""
    assert rule("supervise_daemon.runtime.loop", innocent) == []


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.process
@pytest.mark.parametrize("module", ["supervise_daemon.__main__", "supervise_daemon.assembly", "supervise_daemon.cli.run"])
def test_the_supervising_process_never_loads_what_it_does_not_use(module: str) -> None:
    """Torch and numpy never; rich, submitit, yaml and watchdog only in what uses them."""
    heavy = ("torch", "numpy", "rich", "submitit", "yaml", "watchdog")
    assert _python(f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])") == "[]"


@pytest.mark.process
def test_importing_the_hooks_has_no_side_effect() -> None:
    """`import supervise_hooks` loads no torch or numpy, starts no thread and takes no signal."""
    code = (
        "import signal, sys, threading; before = [signal.getsignal(n) for n in signal.valid_signals()]; import supervise_hooks; "
        "print('torch' in sys.modules, 'numpy' in sys.modules, threading.active_count(), "
        "[signal.getsignal(n) for n in signal.valid_signals()] == before)"
    )
    assert _python(code) == "False False 1 True"


@pytest.mark.process
def test_the_contract_loads_only_its_two_libraries() -> None:
    """Both sides can afford it: nothing but the standard library, msgspec and xxhash is loaded by any of its modules."""
    names = sorted(module for module, _ in rules.sources() if module.startswith(rules.CONTRACT + "."))
    code = (
        f"import sys; before = set(sys.modules); import {', '.join(names)}; "
        "print(sorted({n.split('.')[0] for n in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    # msgspec takes typing_extensions where that is installed.
    assert _python(code).replace(" 'typing_extensions',", "") == str(["msgspec", "supervise_hooks", "xxhash"])
