"""What an earlier supervisor of the same run left on this machine: wait for its tree, end it, or refuse to start beside it."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from supervise_daemon.runtime.tree import find_carrying, kill_carrying
from supervise_hooks.contract import env

_LOOK_S = 0.2


def take_over(
    run_dir: Path, wait_s: float, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> str | None:
    """None when no process of an earlier attempt is left here; else why this run cannot start. Blocks up to `wait_s`.

    They are found by the run directory in their environment, so a lost journal does not hide them. Ranks that were told to `flush`
    when their supervisor dies are leaving: they get `wait_s`, then SIGKILL. Ranks told to `continue` are left alone.
    Runs in a worker thread, while no tree of ours lives.
    """
    theirs = f"{env.RUN_DIR}={run_dir.absolute()}"
    old = find_carrying(theirs)
    if not old:
        return None
    attempt, policy = _told(old)
    if policy == "continue":
        pids = ", ".join(str(process.pid) for process in old[:8])
        return (
            f"attempt {attempt} still runs without a supervisor (pids {pids}) as --on-supervisor-death=continue asked; "
            "end it, or wait for it, then start again"
        )
    say(
        f"attempt {attempt} of a supervisor that died is still here ({len(old)} processes): waiting up to {wait_s:g} s for its flush"
    )
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and find_carrying(theirs):
        pause(_LOOK_S)
    stuck = kill_carrying(theirs)
    if stuck:
        return f"processes of attempt {attempt} survive SIGKILL: pids {', '.join(str(process.pid) for process in stuck[:8])}"
    return None


def _told(processes: list[psutil.Process]) -> tuple[str, str]:
    """(attempt, what they do without a supervisor), as their environment says."""
    for process in processes:
        try:
            environ = process.environ()
        except psutil.Error:
            continue  # just gone
        return environ.get(env.ATTEMPT, "?"), environ.get(env.ON_SUPERVISOR_DEATH, "flush")
    return "?", "flush"
