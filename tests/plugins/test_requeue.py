"""What becomes of a preempted job."""

from supervise_daemon.requeue.exit_code import ExitCodeRequeue
from supervise_daemon.requeue.local import LocalRequeue


def test_by_exit_code_somebody_else_starts_us() -> None:
    """Accepted, no relaunch here."""
    done = ExitCodeRequeue().requeue("notice", 3.0)
    assert (done.accepted, done.relaunch_in_s) == (True, None)
    assert "75" in done.detail


def test_local_launches_here_after_its_pause() -> None:
    """Accepted, with the pause it was given."""
    done = LocalRequeue(2.5).requeue("notice", None)
    assert (done.accepted, done.relaunch_in_s) == (True, 2.5)
