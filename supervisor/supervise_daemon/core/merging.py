"""Merging of notices: the nearer deadline and the graver action win. Pure."""

from supervise_daemon.core.events import Action, NoticeArrived
from supervise_daemon.core.job import Job, Notice
from supervise_daemon.core.transition import Now, evolve

_GRAVITY: dict[Action, int] = {"flush": 0, "preempt": 1, "stop": 2}
"""A user's stop beats a preemption: what a user cancelled is never requeued."""


def merge_notice(job: Job, event: NoticeArrived, now: Now) -> Job:
    """The job with `event` merged into its notice. A `flush` alone is no notice: nothing will be taken away."""
    if event.action == "flush":
        return job
    deadline = now.monotonic + event.grace_s
    old = job.notice
    if old is None:
        notice = Notice(sources=(event.source,), action=event.action, deadline=deadline, exit_code=event.exit_code)
        return evolve(job, notice=notice)
    graver = _GRAVITY[event.action] > _GRAVITY[old.action]
    sources = old.sources if event.source in old.sources else (*old.sources, event.source)
    notice = Notice(
        sources=sources,
        action=event.action if graver else old.action,
        deadline=min(old.deadline, deadline),
        exit_code=event.exit_code if graver else old.exit_code,
    )
    return evolve(job, notice=notice)
