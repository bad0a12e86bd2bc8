"""The small worlds that the explorer walks; each is rich in one thing, so that all together stay small."""

import functools

from kit.builders import a_notice
from kit.explorer import Found, explore
from kit.world import Rank, World
from supervise_daemon.core.job import Job, Limits
from supervise_daemon.core.restart import RestartPolicy

PREEMPT = a_notice("preempt")
SHORT = a_notice("preempt", grace_s=2.0)
STOP = a_notice("stop", exit_code=130)
STOP_0 = a_notice("stop", exit_code=0)
FLUSH = a_notice("flush")

WORLDS: dict[str, tuple[int, World]] = {
    "two ranks and a notice": (
        0,
        World(ranks=(Rank(rich=True), Rank()), notices=(PREEMPT,), notices_left=1, relaunches=False),
    ),
    "two plain ranks and two notices": (
        0,
        World(ranks=(Rank(), Rank()), notices=(SHORT, FLUSH), notices_left=2, relaunches=False),
    ),
    "one rank and two notices": (
        0,
        World(ranks=(Rank(rich=True),), notices=(SHORT, STOP_0, FLUSH), notices_left=2, relaunches=False),
    ),
    "a stray term and a flush": (
        0,
        World(ranks=(Rank(rich=True),), notices=(FLUSH,), notices_left=1, terms_left=1, relaunches=False),
    ),
    "periodic saves": (0, World(ranks=(Rank(rich=True),), notices=(FLUSH,), notices_left=1, saves_left=1)),
    "two crashes": (1, World(ranks=(Rank(), Rank()))),
    "preempted and crashed": (1, World(ranks=(Rank(),), notices=(PREEMPT, STOP), notices_left=1)),
    "preempted twice": (0, World(ranks=(Rank(),), notices=(PREEMPT, STOP), notices_left=2)),
    "no hooks": (1, World(ranks=(), hooked=False, notices=(PREEMPT, SHORT, STOP, FLUSH), notices_left=2)),
}


def job_with_crashes(max_crashes: int) -> Job:
    """A job that survives so many crashes."""
    return Job(limits=Limits(restart=RestartPolicy(max_crashes=max_crashes)))


@functools.cache
def walk(name: str) -> Found:
    """What the explorer sees in this world; walked once in a session. Raises Broken."""
    max_crashes, world = WORLDS[name]
    return explore(job_with_crashes(max_crashes), world)
