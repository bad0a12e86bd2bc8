"""Which checkpoint the next attempt starts from, and why that one. Pure: what is on disk comes in as facts.

Order is by step number, never by name or time; a pointer is no evidence; an emergency checkpoint has no precedence.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

State = Literal["whole", "torn", "unfinished", "writing", "unknown"]
FolderState = Literal["absent", "empty", "unreadable", "not a folder", "ok"]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint as found."""

    path: str
    step: int | None
    run_id: str | None
    attempt: int = 0
    state: State
    problems: tuple[str, ...] = ()


class ResumeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice depends on besides the checkpoints."""

    run_id: str
    folder: FolderState
    folder_path: str
    first_attempt: bool
    """No attempt of this run was ever launched."""
    ever_whole: bool
    """A checkpoint of this run was once proved whole."""
    fresh_allowed: bool = False
    """The user asked for a fresh start."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Start from `path`, or fresh when None."""

    path: str | None
    step: int | None
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()
    """(path, why not) of those that came before it."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing may be launched: a fresh start would silently throw work away."""

    reason: str


def order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Newest first: by step, of equal steps the later attempt; those without a step last."""
    return sorted(candidates, key=lambda c: (c.step if c.step is not None else -1, c.attempt, c.path), reverse=True)


def choose_resume_point(candidates: Sequence[Candidate], facts: ResumeFacts) -> Choice | Refusal:
    """The newest whole checkpoint of this run; or a fresh start, where that loses nothing; or a refusal that says what to do."""
    if facts.fresh_allowed:
        return Choice(path=None, step=None, reason="a fresh start was asked for (--fresh)")
    if facts.folder in ("unreadable", "not a folder"):
        what = "it cannot be read" if facts.folder == "unreadable" else "it is not a folder"
        return Refusal(reason=f"cannot look for checkpoints in {facts.folder_path}: {what}; correct --checkpoints, or pass --fresh")
    passed: list[tuple[str, str]] = []
    for candidate in order(candidates):
        why_not = why_passed_over(candidate, facts.run_id)
        if why_not is None:
            reason = f"step {candidate.step} is the newest whole checkpoint"
            if passed:
                reason += f" ({len(passed)} newer passed over: {_name(passed[0][0])}: {passed[0][1]})"
            return Choice(path=candidate.path, step=candidate.step, reason=reason, passed_over=tuple(passed))
        passed.append((candidate.path, why_not))
    return _without_whole(candidates, facts, tuple(passed))


def why_passed_over(candidate: Candidate, run_id: str) -> str | None:
    """Why this one is no resume point; None when it is."""
    if candidate.state == "writing":
        return "it is being written"
    if candidate.state == "unfinished":
        return "it was never finished: " + (candidate.problems[0] if candidate.problems else "no manifest")
    if candidate.run_id is not None and candidate.run_id != run_id:
        return f"it belongs to run {candidate.run_id!r}"
    if candidate.state == "torn":
        return "torn: " + (candidate.problems[0] if candidate.problems else "not whole")
    if candidate.state == "unknown" or candidate.step is None:
        return "nothing proves it whole"
    return None


def _without_whole(candidates: Sequence[Candidate], facts: ResumeFacts, passed: tuple[tuple[str, str], ...]) -> Choice | Refusal:
    if not candidates:
        where = {"absent": "does not exist yet", "empty": "is empty"}.get(facts.folder, "holds no checkpoints")
        if facts.ever_whole:
            return Refusal(
                reason=f"cannot resume: {facts.folder_path} {where}, but this run had a whole checkpoint before; "
                "bring it back, correct --checkpoints, or pass --fresh"
            )
        return Choice(path=None, step=None, reason=f"fresh start: {facts.folder_path} {where}")
    foreign = [c for c in candidates if c.run_id is not None and c.run_id != facts.run_id]
    ours = [c for c in candidates if c not in foreign]
    if not ours and not facts.ever_whole:
        first = order(foreign)[0]
        return Choice(
            path=None,
            step=None,
            reason=f"fresh start: {len(foreign)} checkpoints in {facts.folder_path} belong to another run ({first.run_id!r}); "
            f"to go on from one, put `--resume {first.path}` in your command or use --name {first.run_id}",
            passed_over=passed,
        )
    if not facts.first_attempt and not facts.ever_whole:
        return Choice(
            path=None, step=None, reason=f"fresh start: this run has not finished a checkpoint yet ({len(ours)} unfinished)", passed_over=passed
        )
    listed = "; ".join(f"{_name(path)}: {why}" for path, why in passed[:3]) + ("; …" if len(passed) > 3 else "")
    return Refusal(
        reason=f"cannot resume: {facts.folder_path} holds {len(candidates)} checkpoints and none is whole ({listed}); "
        "move them away or pass --fresh to start from scratch"
    )


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
