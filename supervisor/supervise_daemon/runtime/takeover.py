"""What an earlier supervisor of the same run left on this machine: wait for its tree, end it, or refuse to start beside it."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from supervise_daemon.runtime.journal import Memory
from supervise_daemon.runtime.run_dir import remove_private_dir
from supervise_daemon.runtime.tree import find_marked, kill_marked

_LOOK_S = 0.2


def take_over(
    memory: Memory, wait_s: float, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> str | None:
    """None when nothing of the newest attempt is left here; else why this run cannot start. Blocks up to `wait_s`.

    Ranks that were told to `flush` when their supervisor dies are leaving: they get `wait_s`, then SIGKILL. Ranks that were
    told to `continue` are left alone. Runs in a worker thread.
    """
    if memory.marker is None or memory.host != os.uname().nodename:
        return None
    old = find_marked(memory.marker)
    if old and memory.on_supervisor_death == "continue":
        pids = ", ".join(str(process.pid) for process in old[:8])
        return (
            f"attempt {memory.attempt} still runs without a supervisor (pids {pids}) as --on-supervisor-death=continue asked; "
            "end it, or wait for it, then start again"
        )
    if old:
        say(
            f"attempt {memory.attempt} of a supervisor that died is still here ({len(old)} processes): "
            f"waiting up to {wait_s:g} s for its flush"
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and find_marked(memory.marker):
            pause(_LOOK_S)
        stuck = kill_marked(memory.marker)
        if stuck:
            return f"processes of attempt {memory.attempt} survive SIGKILL: pids {', '.join(str(process.pid) for process in stuck[:8])}"
    if memory.private_dir is not None:
        remove_private_dir(Path(memory.private_dir))
    return None
