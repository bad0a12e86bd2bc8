"""Handing a job back by exit code 75 alone: whoever started us runs it again (an outer loop, Kubernetes, RequeueExit=75)."""

from supervise_daemon.ports import Requeued


class ExitCodeRequeue:
    """Does nothing but leave."""

    name = "exit_code"

    def requeue(self, reason: str, left_s: float | None) -> Requeued:
        """Always accepted."""
        return Requeued(accepted=True, relaunch_in_s=None, detail="preempted: exit code 75 asks to run the same command again")
