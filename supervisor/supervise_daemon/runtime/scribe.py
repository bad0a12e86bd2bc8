"""One thread that writes records, in order, so that a slow disk never holds up the loop: an fsync behind a flush can take seconds."""

import threading
from collections import deque
from collections.abc import Callable


class Scribe:
    """Runs writing jobs one after the other. A keyed job that has not begun is replaced by a newer one of the same key."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[str | None, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._thread: threading.Thread | None = None

    def write(self, job: Callable[[], None], key: str | None = None) -> None:
        """Queue a job; it must not raise."""
        with self._changed:
            if key is not None:
                self._jobs = deque(waiting for waiting in self._jobs if waiting[0] != key)
            self._jobs.append((key, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="supervise-scribe", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def sync(self) -> None:
        """Until everything queued so far is on disk: before a spawn or a requeue, and at the end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: bool(self._jobs))
                _, job = self._jobs.popleft()
                self._busy = True
            job()
