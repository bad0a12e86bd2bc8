"""The rules of the house as functions over source text, so that each can be shown to find an offender."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DAEMON = ROOT / "supervisor" / "supervise_daemon"
HOOKS = ROOT / "hooks" / "supervise_hooks"

WORLD = {"os", "time", "signal", "socket", "threading", "logging", "random", "subprocess", "pathlib", "selectors", "asyncio", "shutil", "tempfile"}
PLUGINS = ("launchers", "notices", "formats", "requeue", "notify")
DRAWERS = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}


def sources() -> list[tuple[str, str]]:
    """(dotted module name, text) of every product module."""
    found = []
    for shelf in (ROOT / "supervisor", ROOT / "hooks"):
        for path in sorted(shelf.rglob("*.py")):
            parts = path.relative_to(shelf).with_suffix("").parts
            found.append((".".join(part for part in parts if part != "__init__"), path.read_text()))
    return found


def imports(text: str) -> list[tuple[str, bool]]:
    """(imported module or module.name, whether at the top level) of a module's text."""
    tree = ast.parse(text)
    top = set(tree.body)
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, node in top))
            found += [(f"{node.module}.{alias.name}", node in top) for alias in node.names]
    return found


def forbidden_imports(module: str, text: str) -> list[str]:
    """Imports of `module` that the import rules of the design refuse."""
    return [f"{module} imports {name}" for name, _ in imports(text) if not _allowed(module, name)]


def _allowed(module: str, name: str) -> bool:
    first = name.split(".")[0]
    if module.startswith("supervise_hooks.contract"):
        return not (first in {"supervise_daemon", "torch", "numpy", "psutil", "click", "rich", "yaml", "watchdog"} or _hooks_beyond_contract(name))
    if module.startswith("supervise_hooks"):
        framework = first in {"torch", "numpy"} and not module.startswith("supervise_hooks.integrations") and module != "supervise_hooks.store"
        integration = name.startswith("supervise_hooks.integrations") and not module.startswith("supervise_hooks.integrations")
        return not (first == "supervise_daemon" or framework or integration)
    if first in {"torch", "numpy"} or _hooks_beyond_contract(name):
        return False
    if module.startswith("supervise_daemon.core"):
        ours = name.startswith(("supervise_daemon.core", "supervise_hooks.contract"))
        return first not in WORLD and (first != "supervise_daemon" or ours)
    for family in PLUGINS:
        if module.startswith(f"supervise_daemon.{family}"):
            rest = name.removeprefix("supervise_daemon.").split(".")[0]
            return not name.startswith("supervise_daemon.") or rest in ("ports", "core", "job_spec", family) or _is_torchrun_env(module, name)
    if module.startswith("supervise_daemon.runtime"):
        return not any(name.startswith(f"supervise_daemon.{family}") for family in (*PLUGINS, "cli", "assembly", "config"))
    return True


def _is_torchrun_env(module: str, name: str) -> bool:
    return module.startswith("supervise_daemon.launchers") and name.startswith("supervise_daemon.launchers")


def _hooks_beyond_contract(name: str) -> bool:
    return name.startswith("supervise_hooks") and name != "supervise_hooks" and not name.startswith("supervise_hooks.contract")


def undurable_writes(module: str, text: str) -> list[str]:
    """Writes to files that go past `contract.durable`. Logs and pipes are opened with os.open, deliberately."""
    if module.endswith("contract.durable"):
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        mode = next((word.value for word in node.keywords if word.arg == "mode"), node.args[1] if len(node.args) > 1 else None)
        writes = isinstance(mode, ast.Constant) and isinstance(mode.value, str) and any(letter in mode.value for letter in "wax+")
        if name in ("write_text", "write_bytes") or (name == "open" and isinstance(node.func, ast.Name) and writes):
            found.append(f"{module}:{node.lineno} calls {name}")
    return found


def sleeps(module: str, text: str) -> list[str]:
    """`time.sleep` where only waiting on events is right."""
    return [
        f"{module}:{node.lineno} sleeps"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"
    ]


def bad_names(module: str, text: str) -> list[str]:
    """Modules named for being a drawer."""
    return [f"{module} is a drawer"] if module.rsplit(".", 1)[-1] in DRAWERS else []
