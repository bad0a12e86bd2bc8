"""Launching again on this machine: for machines that announce a preemption and then stay, and for rehearsals."""

from supervise_daemon.ports import Requeued


class LocalRequeue:
    """Waits and relaunches here."""

    name = "local"

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def requeue(self, reason: str, left_s: float | None) -> Requeued:
        """The next attempt starts here after the pause."""
        return Requeued(accepted=True, relaunch_in_s=self.delay_s, detail=f"launching again here in {self.delay_s:g} s")
