"""The rules of the house as functions over source text, so that each can be shown to find an offender."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CONTRACT = "supervise_hooks.contract"
INTEGRATIONS = "supervise_hooks.integrations"
CONTRACT_LIBRARIES = {"msgspec", "xxhash"}
"""The digest library of design section 3.2, and msgspec by supervisor/decisions/0001."""
WORLD = {
    *("os", "io", "time", "datetime", "signal", "socket", "selectors", "threading", "asyncio", "multiprocessing", "concurrent"),
    *("logging", "random", "secrets", "uuid", "subprocess", "pathlib", "shutil", "tempfile"),
    *("psutil", "click", "rich", "watchdog", "yaml"),
}
"""What touches the world: not for `core`."""
PLUGINS = ("launchers", "notices", "formats", "requeue", "notify")
HEAVY = {"torch", "numpy"}
DRAWERS = {"utils", "util", "helpers", "helper", "common", "base", "manager", "managers", "misc"}


def sources() -> list[tuple[str, str]]:
    """(dotted module name, text) of every product module."""
    found = []
    for shelf in (ROOT / "supervisor", ROOT / "hooks"):
        for path in sorted(shelf.rglob("*.py")):
            parts = path.relative_to(shelf).with_suffix("").parts
            found.append((".".join(part for part in parts if part != "__init__"), path.read_text()))
    return found


def imports(text: str) -> Iterator[str]:
    """Every module, and module.name, that a text imports anywhere, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import would not show which part of the house it reaches: refused by a name nothing allows.
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden_imports(module: str, text: str) -> list[str]:
    """Imports of `module` that the import rules of design section 3 refuse."""
    return [f"{module} imports {name}" for name in imports(text) if name.startswith(".") or not _allowed(module, name)]


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _allowed(module: str, name: str) -> bool:
    first = name.split(".")[0]
    if _within(module, CONTRACT):
        return first in sys.stdlib_module_names | CONTRACT_LIBRARIES or _within(name, CONTRACT)
    if _within(module, "supervise_hooks"):
        integrates = _within(module, INTEGRATIONS)
        framework = first in HEAVY and not integrates and module != "supervise_hooks.store"
        return not (first == "supervise_daemon" or framework or (_within(name, INTEGRATIONS) and not integrates))
    if first in HEAVY or (first == "supervise_hooks" and not _within(name, CONTRACT) and name != "supervise_hooks"):
        return False
    return _allowed_in_daemon(module, name)


def _allowed_in_daemon(module: str, name: str) -> bool:
    part, wanted = (dotted.removeprefix("supervise_daemon.").split(".")[0] for dotted in (module, name))
    inside = name.startswith("supervise_daemon.")
    if part == "core":
        return (not inside and name.split(".")[0] not in WORLD) or wanted == "core"
    if part in PLUGINS:
        return not inside or wanted in {"ports", "core", "job_spec", "slurm", part}
    if part == "slurm":  # what the parts that speak to Slurm share: it knows none of them
        return not inside or wanted in {"core", "slurm"}
    if part == "runtime":
        return not inside or wanted not in {*PLUGINS, "cli", "assembly", "config"}
    if part in ("ports", "job_spec", "config"):
        return not inside or wanted in {"core", "job_spec", "ports"}
    # `assembly` alone names concrete classes; the verbs that only look at checkpoints ask the registry of formats.
    return part == "assembly" or not inside or wanted not in PLUGINS or (part == "cli" and wanted == "formats")


def lazy_frameworks(module: str, text: str) -> list[str]:
    """Integrations that import their framework elsewhere than at their top: it would be missed in the middle of a run."""
    if not _within(module, INTEGRATIONS):
        return []
    tree = ast.parse(text)
    deep = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and node not in tree.body]
    return [f"{module}:{node.lineno} imports inside" for node in deep if set(imports(ast.unparse(node))) & HEAVY]


def _calls(text: str) -> Iterator[tuple[ast.Call, str, str]]:
    """(call, name of what is called, what it is an attribute of) for every call in a text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr, ast.unparse(node.func.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node, node.func.id, ""


def undurable_writes(module: str, text: str) -> list[str]:
    """Writes and renames of files that go past `contract.durable`. Logs and locks are opened with os.open, deliberately."""
    if module == f"{CONTRACT}.durable":
        return []
    return [f"{module}:{call.lineno} calls {name}" for call, name, owner in _calls(text) if _writes(call, name, owner)]


def _writes(call: ast.Call, name: str, owner: str) -> bool:
    if name in ("write_text", "write_bytes"):
        return True
    if owner == "os" and name in ("replace", "rename", "symlink", "link"):
        return True
    if owner == "shutil" and name.startswith(("copy", "move")):
        return True
    if name not in ("open", "fdopen") or (owner == "os" and name == "open"):
        return False
    words = [word.value for word in call.keywords if word.arg == "mode"] + call.args[:2]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(len(mode) <= 4 and set(mode) <= set("rwxabt+") and set(mode) & set("wxa+") for mode in modes)


def sleeps(module: str, text: str) -> list[str]:
    """`time.sleep` where only waiting on events is right."""
    imported = [f"{module} imports time.sleep" for name in imports(text) if name == "time.sleep"]
    return imported + [
        f"{module}:{call.lineno} sleeps" for call, name, owner in _calls(text) if (name, owner) == ("sleep", "time")
    ]


def prints(module: str, text: str) -> list[str]:
    """`print` in the parts of the daemon that have no terminal: they journal or log."""
    if not module.startswith(("supervise_daemon.core", "supervise_daemon.runtime", CONTRACT)):
        return []
    return [f"{module}:{call.lineno} prints" for call, name, owner in _calls(text) if (name, owner) == ("print", "")]


def unpickles(module: str, text: str) -> list[str]:
    """Anything that runs code found in a checkpoint (design section 8)."""
    found = [
        f"{module} imports {name}" for name in imports(text) if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "shelve")
    ]
    for call, name, owner in _calls(text):
        safe = any(
            word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value for word in call.keywords
        )
        if (name, owner) == ("load", "torch") and not safe:
            found.append(f"{module}:{call.lineno} calls torch.load")
        if not owner and name in ("eval", "exec"):
            found.append(f"{module}:{call.lineno} calls {name}")
    return found


def shells(module: str, text: str) -> list[str]:
    """Commands given to a shell: arguments go by list (C72)."""
    found = [
        f"{module}:{call.lineno} calls os.{name}"
        for call, name, owner in _calls(text)
        if (name, owner) in {("system", "os"), ("popen", "os")}
    ]
    return found + [
        f"{module}:{call.lineno} uses a shell" for call, _, _ in _calls(text) for word in call.keywords if word.arg == "shell"
    ]


def oversized(module: str, text: str) -> list[str]:
    """Modules that nobody reads any more."""
    lines = text.count("\n")
    return [f"{module} has {lines} lines"] if lines > 450 else []


def bad_names(module: str, text: str) -> list[str]:
    """Modules named for being a drawer."""
    return [f"{module} is a drawer"] if module.rsplit(".", 1)[-1] in DRAWERS else []
