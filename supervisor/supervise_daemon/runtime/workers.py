"""A few threads for work that blocks (hashing, scontrol, HTTP). They only compute and post; the loop decides."""

import os
import queue
import threading
from collections.abc import Callable

from supervise_daemon.core.events import Event


class Workers:
    """Runs functions off the loop's thread; the event each returns is read by the loop."""

    def __init__(self, threads: int = 3) -> None:
        self._threads = threads
        self._started = 0
        self._jobs: queue.SimpleQueue[Callable[[], Event | None]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """Readable when `take` has something."""
        return self._read

    def submit(self, work: Callable[[], Event | None]) -> None:
        """Run `work`; threads are made on first use. The loop's thread only."""
        if self._started < self._threads:
            self._started += 1
            # Daemons: work that takes minutes (digests of a big checkpoint) must not hold up our exit.
            threading.Thread(target=self._serve, name=f"supervise-worker-{self._started}", daemon=True).start()
        self._jobs.put(work)

    def _serve(self) -> None:
        while True:
            self._run(self._jobs.get())

    def _run(self, work: Callable[[], Event | None]) -> None:
        try:
            result: Event | BaseException | None = work()
        except BaseException as error:  # noqa: BLE001 - raised again in the loop's thread, where it is our own fault
            result = error
        if result is not None:
            self.post(result)

    def post(self, result: Event | BaseException) -> None:
        """Hand something to the loop, from any thread."""
        self._done.put(result)
        try:
            os.write(self._write, b"!")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    def take(self) -> list[Event]:
        """Everything posted since the last call. Raises what a worker raised."""
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        events: list[Event] = []
        while True:
            try:
                result = self._done.get_nowait()
            except queue.Empty:
                return events
            if isinstance(result, BaseException):
                raise result
            events.append(result)
