"""How handlers of the machine express what they decide: enter a phase, or stay. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from supervise_daemon.core.commands import ArmTimer, Command, DisarmTimer
from supervise_daemon.core.job import Job, Phase

Transition = tuple[Job, tuple[Command, ...], str]


class Now(msgspec.Struct, frozen=True):
    """The two clocks of one step."""

    monotonic: float
    """For deadlines."""
    wall: float
    """For memory that outlives this process."""


def evolve(job: Job, **changes: Any) -> Job:
    """A copy with these fields changed."""
    return msgspec.structs.replace(job, **changes)


def stay(job: Job, reason: str, *commands: Command) -> Transition:
    """No change of phase; the armed timer stays armed."""
    return job, commands, reason


def ignore(job: Job, reason: str) -> Transition:
    """The event is legal here but changes nothing."""
    return job, (), f"ignored: {reason}"


def enter(
    job: Job, phase: Phase, reason: str, *, timer: tuple[str, float] | None, commands: Iterable[Command] = ()
) -> Transition:
    """Change the phase, replacing the timer: `(name, monotonic time)`, or None for a phase that needs none."""
    job = evolve(job, phase=phase)
    job, timer_commands = rearm(job, timer)
    return job, (*timer_commands, *commands), reason


def rearm(job: Job, timer: tuple[str, float] | None) -> tuple[Job, tuple[Command, ...]]:
    """Replace the armed timer without changing phase."""
    job = evolve(job, serial=job.serial + 1, due=None if timer is None else timer[1])
    if timer is None:
        return job, (DisarmTimer(),)
    name, at = timer
    return job, (ArmTimer(name=name, serial=job.serial, at=at),)
