"""Every environment variable that crosses from the daemon into the job, named once.

The daemon sets them for each attempt; the hook library and users' scripts read them.
"""

SOCKET = "SUPERVISE_SOCKET"
"""Path of the Unix socket on which the daemon hears ranks. Unset: nobody supervises."""

RUN_ID = "SUPERVISE_RUN_ID"
"""The same in every attempt of a job; usable as a tracking-run id (wandb, mlflow)."""

ATTEMPT = "SUPERVISE_ATTEMPT"
"""Number of this launch, from 1 over the job's whole life, requeues included."""

RESUME = "SUPERVISE_RESUME"
"""Path of the checkpoint to start from; empty for a fresh start."""

RESUME_STEP = "SUPERVISE_RESUME_STEP"
"""Step of that checkpoint; empty for a fresh start."""

CHECKPOINTS = "SUPERVISE_CHECKPOINTS"
"""Folder for checkpoints, if the daemon was told one; an explicit argument in the script wins."""

RUN_DIR = "SUPERVISE_RUN_DIR"
"""The run directory (`.supervise/<name>`)."""

MARKER = "SUPERVISE_MARKER"
"""Unguessable value, new for each attempt: finds every process of an attempt, whoever its parent is."""

ON_SUPERVISOR_DEATH = "SUPERVISE_ON_SUPERVISOR_DEATH"
"""What ranks do when the daemon vanishes: `flush` (save, then leave; the default) or `continue`."""
