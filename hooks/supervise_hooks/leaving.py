"""Ending a rank at once: no collectives, no interpreter shutdown that a broken process group or a data worker could block."""

import logging
import os
import sys
import threading
import time
from typing import NoReturn

_FLUSH_S = 1.0
_CHILDREN_S = 0.2


def leave(code: int) -> NoReturn:
    """Flush what people read, kill this process's children, exit with `code`. From any thread."""
    # A full pipe, or a lock held by the main thread, must not keep us: the flush has a second, in a thread of its own.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_S)
    _kill_children()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError) as error:  # closed, replaced, or its reader is gone
            os.write(2, f"supervise: cannot flush output: {error}\n".encode())
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]  # noqa: SLF001  what logging.shutdown walks
        handler = reference()
        if handler is not None:
            handler.flush()


def _kill_children() -> None:
    """Data workers die with us; unkilled they would notice only after their own timeout."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    children = multiprocessing.active_children()
    for child in children:  # told first: a killed worker leaves the folder of its sockets in /tmp
        child.terminate()
    deadline = time.monotonic() + _CHILDREN_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
