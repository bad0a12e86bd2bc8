"""Choosing a resume point on a real folder: a quick look at all, full proof from the newest down, torn ones moved aside.

The decision itself is `core.resume`; this feeds it with what the disk says.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from supervise_daemon.core.resume import Candidate, Choice, Refusal, ResumeFacts, choose_resume_point, order
from supervise_daemon.formats import catalog, tending
from supervise_hooks.contract.verification import Depth

OnBytes = Callable[[int], None]
_PAUSE_S = 0.25


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How to look."""

    relook_s: float = 0.0
    """How long a newer checkpoint that only lacks a file is looked at again, in total."""
    pause: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    on_bytes: OnBytes | None = None
    """Called from several threads with bytes read."""


def decide(folder: Path, facts: ResumeFacts, look: Look) -> tuple[Choice | Refusal, list[Candidate]]:
    """The decision, its choice proved fully; and every candidate as last seen. Changes nothing on disk."""
    if facts.folder != "ok" or facts.fresh_allowed:
        return choose_resume_point([], facts), []
    try:
        found = {checkpoint.candidate.path: checkpoint for checkpoint in catalog.scan(folder)}
    except OSError:  # it was there a moment ago
        return choose_resume_point([], msgspec.structs.replace(facts, folder="unreadable")), []
    deadline = look.clock() + look.relook_s
    proved: set[str] = set()
    while True:
        candidates = [checkpoint.candidate for checkpoint in found.values()]
        decision = choose_resume_point(candidates, facts)
        chosen = decision.path if isinstance(decision, Choice) else None
        late = _newer_incomplete(found, chosen, facts.run_id)
        if late and look.clock() < deadline:
            look.pause(_PAUSE_S)
            _look_again(found, late, "quick", None)
        elif chosen is None or chosen in proved:
            return decision, candidates
        else:
            proved.add(chosen)
            _look_again(found, [chosen], "full", look.on_bytes)


def _newer_incomplete(found: dict[str, catalog.Found], chosen: str | None, run_id: str) -> list[str]:
    """Paths of those that would be chosen instead, were a file that is missing now to appear."""
    newer = []
    for candidate in order([checkpoint.candidate for checkpoint in found.values()]):
        if candidate.path == chosen:
            break
        if candidate.run_id == run_id and catalog.may_still_appear(found[candidate.path]):
            newer.append(candidate.path)
    return newer


def _look_again(found: dict[str, catalog.Found], paths: Sequence[str], depth: Depth, on_bytes: OnBytes | None) -> None:
    for path in paths:
        fresh = catalog.look(Path(path), depth, on_bytes)
        if fresh is None:
            del found[path]  # moved or removed under our eyes
        else:
            found[path] = fresh


def clear_away(candidates: Sequence[Candidate], decision: Choice, run_id: str, say: Callable[[str], None]) -> None:
    """Torn checkpoints of this run, not older than the choice, are moved aside: nobody shall stumble over them again.

    Only with evidence that they are this run's; and not those that could not be read just now, which may be sound.
    """
    for candidate in candidates:
        newer = decision.step is None or candidate.step is None or candidate.step >= decision.step
        unread = any(" cannot be read: " in problem for problem in candidate.problems)
        if candidate.state == "torn" and candidate.run_id == run_id and newer and not unread:
            tending.set_aside(Path(candidate.path), say, candidate.problems[0] if candidate.problems else "not whole")
