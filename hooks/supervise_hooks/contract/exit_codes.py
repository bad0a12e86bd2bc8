"""Exit codes of `supervise`, a promise to outer scripts. A job that failed for good gives its own."""

FINISHED = 0
USAGE = 2
NO_RESUME_POINT = 66
"""EX_NOINPUT: checkpoints exist but none can be resumed from, and a fresh start was not allowed."""
INTERNAL = 70
"""EX_SOFTWARE: our own fault."""
ALREADY_RUNNING = 73
"""EX_CANTCREAT: another supervisor, or a live tree of an earlier one, owns this run."""
PREEMPTED = 75
"""EX_TEMPFAIL: preempted, to be run again."""


def from_signal(number: int) -> int:
    """The shell's convention for death by, or stop on, a signal."""
    return 128 + number


def from_status(returncode: int) -> int:
    """Map a `Popen`-style return code (negative for signals) to an exit code."""
    return from_signal(-returncode) if returncode < 0 else returncode
