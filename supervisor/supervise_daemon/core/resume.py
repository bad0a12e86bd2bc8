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
    """The step its manifest records; without a manifest, the one in its name."""
    run_id: str | None
    """None: nothing in it says whose it is."""
    attempt: int = 0
    state: State
    problems: tuple[str, ...] = ()
    sealed_kind: bool = True
    """In our own layout, finished or not. False: a file or folder of another format, which no run can be held against."""
    world_size: int | None = None
    """Ranks that saved it."""


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
    world_size: int | None = None
    """Ranks of the coming attempt, where that is known."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Start from `path`, or fresh when None."""

    path: str | None
    step: int | None
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()
    """(path, why not) of those that came before it, newest first."""
    notes: tuple[str, ...] = ()
    """What the user should know of the choice though nothing is wrong with it."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing may be launched: a fresh start would silently throw work away. Exit code NO_RESUME_POINT."""

    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()


def order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Newest first: by step, of equal steps the later attempt; those without a step last."""
    return sorted(candidates, key=lambda c: (c.step if c.step is not None else -1, c.attempt, c.path), reverse=True)


def choose_resume_point(candidates: Sequence[Candidate], facts: ResumeFacts) -> Choice | Refusal:
    """The newest whole checkpoint of this run; or a fresh start, where that loses nothing; or a refusal that says what to do."""
    if facts.fresh_allowed:
        return Choice(path=None, step=None, reason="a fresh start was asked for (--fresh)")
    if facts.folder in ("unreadable", "not a folder"):
        what = "it cannot be read" if facts.folder == "unreadable" else "it is not a folder"
        reason = f"cannot look for checkpoints in {facts.folder_path}: {what}; correct --checkpoints, or pass --fresh"
        return Refusal(reason=reason)
    passed: list[tuple[str, str]] = []
    for candidate in order(candidates):
        why_not = why_passed_over(candidate, facts.run_id)
        if why_not is None:
            reason = f"step {candidate.step} is the newest whole checkpoint"
            if passed:
                reason += f" ({len(passed)} newer passed over: {_name(passed[0][0])}: {passed[0][1]})"
            notes = _world_note(candidate, facts) + _foreign_note(candidates, facts)
            return Choice(path=candidate.path, step=candidate.step, reason=reason, passed_over=tuple(passed), notes=notes)
        passed.append((candidate.path, why_not))
    return _without_whole(candidates, facts, tuple(passed))


def why_passed_over(candidate: Candidate, run_id: str) -> str | None:
    """Why this one is no resume point of run `run_id`; None when it is."""
    if candidate.run_id is not None and candidate.run_id != run_id:
        return f"it belongs to run {candidate.run_id!r}"
    if candidate.state == "writing":
        return "it is being written"
    if candidate.state == "unfinished":
        return "it was never finished: " + (candidate.problems[0] if candidate.problems else "no manifest")
    if candidate.state == "torn":
        return "torn: " + (candidate.problems[0] if candidate.problems else "not whole")
    if not candidate.sealed_kind:
        return "not one of ours: nothing ties it to this run"
    if candidate.state == "unknown" or candidate.step is None:
        return "nothing proves it whole"
    return None


def _without_whole(candidates: Sequence[Candidate], facts: ResumeFacts, passed: tuple[tuple[str, str], ...]) -> Choice | Refusal:
    """Nothing to resume from: a fresh start where it is harmless."""
    notes = _foreign_note(candidates, facts) + _other_format_note(candidates, facts)
    mine = [c for c in candidates if c.sealed_kind and c.run_id in (None, facts.run_id)]
    where = {"absent": "does not exist yet", "empty": "is empty"}.get(facts.folder, "holds no checkpoints of this run")
    if not mine and facts.ever_whole:
        return Refusal(
            reason=f"cannot resume: {facts.folder_path} {where.removesuffix(' yet')}, but this run had a whole checkpoint "
            "before; bring it back, correct --checkpoints, or pass --fresh",
            passed_over=passed,
        )
    if not mine:
        return Choice(path=None, step=None, reason=f"fresh start: {facts.folder_path} {where}", passed_over=passed, notes=notes)
    if not facts.first_attempt and not facts.ever_whole:
        reason = f"fresh start: this run has not finished a checkpoint yet ({len(mine)} unfinished or torn)"
        return Choice(path=None, step=None, reason=reason, passed_over=passed, notes=notes)
    ours = {c.path for c in mine}
    why = [f"{_name(path)}: {reason}" for path, reason in passed if path in ours]
    listed = "; ".join(why[:3]) + ("; …" if len(why) > 3 else "")
    count = f"{len(mine)} checkpoints exist" if len(mine) > 1 else "1 checkpoint exists"
    return Refusal(
        reason=f"cannot resume: {count} in {facts.folder_path}, none is whole ({listed}); "
        "move them away, or pass --fresh to start from scratch",
        passed_over=passed,
    )


def _world_note(chosen: Candidate, facts: ResumeFacts) -> tuple[str, ...]:
    """Ours can be split anew, so another size is news, not an obstacle."""
    if chosen.world_size is None or facts.world_size is None or chosen.world_size == facts.world_size:
        return ()
    return (f"saved by {chosen.world_size} ranks, started with {facts.world_size}: tensors are split anew on loading",)


def _foreign_note(candidates: Sequence[Candidate], facts: ResumeFacts) -> tuple[str, ...]:
    """One note on other runs' checkpoints, with how to adopt the newest."""
    foreign = [c for c in candidates if c.run_id not in (None, facts.run_id)]
    if not foreign:
        return ()
    newest = order([c for c in foreign if c.state == "whole"] or foreign)[0]
    count = f"{len(foreign)} checkpoints" if len(foreign) > 1 else "1 checkpoint"
    note = (
        f"{count} in {facts.folder_path} of another run ({newest.run_id!r}) left alone; to go on from the newest, "
        f"put `--resume {newest.path}` in your command, or run with --name {newest.run_id!r}"
    )
    return (note,)


def _other_format_note(candidates: Sequence[Candidate], facts: ResumeFacts) -> tuple[str, ...]:
    others = [c for c in candidates if not c.sealed_kind and c.run_id is None]
    if not others:
        return ()
    newest = order(others)[0]
    what = f"{len(others)} files or folders" if len(others) > 1 else "1 file or folder"
    note = (
        f"{what} in {facts.folder_path} look like checkpoints of another format (e.g. {_name(newest.path)}) and were not chosen; "
        f"to start from one, put `--resume {newest.path}` in your command"
    )
    return (note,)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
