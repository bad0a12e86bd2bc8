"""The choice of a resume point: a table of folders and what must come of each."""

from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervise_daemon.core.resume import Candidate, Choice, Refusal, ResumeFacts, choose_resume_point

FACTS = ResumeFacts(run_id="mine", folder="ok", folder_path="/ck", first_attempt=False, ever_whole=True)


def facts(**changes: Any) -> ResumeFacts:
    """A run that has had a whole checkpoint before."""
    return msgspec.structs.replace(FACTS, **changes)


def candidate(step: int | None, **changes: Any) -> Candidate:
    """A whole checkpoint of this run."""
    base = Candidate(path=f"/ck/step-{step}", step=step, run_id="mine", attempt=1, state="whole")
    return msgspec.structs.replace(base, **changes)


def chosen(found: list[Candidate], what: ResumeFacts = FACTS) -> Choice:
    """The decision, which must be a choice."""
    decision = choose_resume_point(found, what)
    assert isinstance(decision, Choice), decision
    return decision


def refused(found: list[Candidate], what: ResumeFacts = FACTS) -> Refusal:
    """The decision, which must be a refusal."""
    decision = choose_resume_point(found, what)
    assert isinstance(decision, Refusal), decision
    return decision


@pytest.mark.parametrize(("low", "high"), [(999, 1000), (9000, 10000), (2, 10)])
def test_order_is_by_number_not_by_text(low: int, high: int) -> None:
    """C29: 1000 beats 999 though its name sorts first; the reason names the step."""
    for found in permutations([candidate(low), candidate(high)]):
        decision = chosen(list(found))
        assert decision.step == high
        assert f"step {high}" in decision.reason


def test_the_step_counts_not_the_name() -> None:
    """C30: a folder renamed to look newer is still its manifest's step."""
    decision = chosen([candidate(10, path="/ck/step-99999"), candidate(30, path="/ck/a")])
    assert decision.path == "/ck/a"


def test_of_one_step_the_later_attempt_wins() -> None:
    """After a walk-back a step exists twice: the later attempt's is the one to go on from."""
    decision = chosen([candidate(20, attempt=3, path="/ck/b"), candidate(20, attempt=12, path="/ck/a"), candidate(10)])
    assert decision.path == "/ck/a"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": "torn", "problems": ("x.bin is missing",)}, "torn: x.bin is missing"),
        ({"state": "unfinished", "problems": ("not sealed: 1 of 2",)}, "never finished: not sealed: 1 of 2"),
        ({"state": "writing"}, "being written"),
        ({"run_id": "other"}, "belongs to run 'other'"),
        ({"run_id": "other", "state": "torn"}, "belongs to run 'other'"),
        ({"state": "unknown"}, "nothing proves it whole"),
        ({"sealed_kind": False, "run_id": None, "state": "unknown"}, "not one of ours"),
    ],
)
def test_what_is_never_chosen_is_passed_over_with_its_reason(change: dict[str, Any], why: str) -> None:
    """C21, C26, C69: the older whole one is taken, and each newer one is named once with what is wrong with it."""
    bad = candidate(20, **change)
    decision = chosen([candidate(10), bad])
    assert decision.step == 10
    assert [path for path, _ in decision.passed_over] == [bad.path]
    assert why in decision.passed_over[0][1]
    assert why in decision.reason


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_first_run_with_nothing_there_starts_fresh(folder: Any) -> None:
    """C32: resume mode is no error on the very first run."""
    decision = chosen([], facts(folder=folder, first_attempt=True, ever_whole=False))
    assert (decision.path, decision.step) == (None, None)
    assert "/ck" in decision.reason


@pytest.mark.parametrize("folder", ["absent", "empty", "ok"])
def test_a_run_that_had_checkpoints_does_not_start_over_when_they_vanish(folder: Any) -> None:
    """C31: a folder that is not mounted today must not cost the work of yesterday."""
    assert "had a whole checkpoint before" in refused([], facts(folder=folder)).reason


@pytest.mark.parametrize(("folder", "why"), [("unreadable", "cannot be read"), ("not a folder", "not a folder")])
@pytest.mark.parametrize("first", [True, False])
def test_a_folder_that_cannot_be_looked_into_stops_the_run(folder: Any, why: str, first: bool) -> None:
    """C31: unreadable is not empty."""
    assert why in refused([], facts(folder=folder, first_attempt=first, ever_whole=False)).reason


@pytest.mark.parametrize("state", ["torn", "unfinished", "writing"])
def test_only_broken_ones_on_a_first_attempt_are_refused(state: Any) -> None:
    """C31: somebody's work lies there; starting from scratch beside it needs a word from the user."""
    reason = refused([candidate(20, state=state)], facts(first_attempt=True, ever_whole=False)).reason
    assert "none is whole" in reason
    assert "--fresh" in reason
    assert "step-20" in reason


@pytest.mark.parametrize("state", ["torn", "unfinished"])
def test_debris_of_own_first_attempts_does_not_stop_the_run(state: Any) -> None:
    """Killed in its first save, a run has lost nothing that it ever had: it starts again."""
    assert chosen([candidate(20, state=state)], facts(first_attempt=False, ever_whole=False)).path is None


def test_once_whole_and_now_all_torn_is_refused_with_each_reason() -> None:
    """C31: never silently from step 0; the message says how many there are and what is wrong."""
    found = [candidate(30, state="torn", problems=("a is missing",)), candidate(20, state="torn", problems=("b is missing",))]
    reason = refused(found).reason
    assert "2 checkpoints exist" in reason
    assert "step-30: torn: a is missing; step-20: torn: b is missing" in reason


def test_another_runs_checkpoints_neither_count_nor_stop_a_fresh_start() -> None:
    """C69: leftovers at higher steps are left alone, in one note that says how to adopt them."""
    found = [candidate(700, run_id="old"), candidate(500, run_id="old")]
    decision = chosen(found, facts(first_attempt=True, ever_whole=False))
    assert decision.path is None
    assert len(decision.notes) == 1
    assert "put `--resume /ck/step-700` in your command" in decision.notes[0]


def test_own_checkpoint_beats_higher_steps_of_another_run() -> None:
    """C69: step 100 of this run is the choice among step 500 to 700 of another."""
    assert chosen([candidate(700, run_id="old"), candidate(500, run_id="old"), candidate(100)]).step == 100


def test_only_another_runs_are_left_of_a_run_that_had_its_own() -> None:
    """A foreign checkpoint does not make up for ours that vanished."""
    assert "had a whole checkpoint before" in refused([candidate(700, run_id="old")]).reason


def test_files_of_other_formats_are_noted_not_chosen() -> None:
    """A folder given by mistake, or a script's own files: a fresh start, with a note naming the newest of them."""
    found = [candidate(3, path="/ck/model_3.pt", run_id=None, state="unknown", sealed_kind=False)]
    decision = chosen(found, facts(first_attempt=True, ever_whole=False))
    assert decision.path is None
    assert "--resume /ck/model_3.pt" in decision.notes[0]


def test_fresh_ignores_everything() -> None:
    """`--fresh` is an order: not even an unreadable folder is in its way."""
    decision = chosen([candidate(20)], facts(folder="unreadable", fresh_allowed=True))
    assert (decision.path, "--fresh" in decision.reason) == (None, True)


@pytest.mark.parametrize(("now", "notes"), [(2, 0), (None, 0), (4, 1)])
def test_another_world_size_is_passed_on_with_a_note(now: int | None, notes: int) -> None:
    """C36: ours are split anew on loading, so it is said and not refused."""
    decision = chosen([candidate(20, world_size=2)], facts(world_size=now))
    assert (decision.step, len(decision.notes)) == (20, notes)


def test_step_zero_is_a_step() -> None:
    """A whole checkpoint of step 0 is before any other, and better than nothing."""
    assert chosen([candidate(0)]).step == 0
    assert chosen([candidate(0), candidate(1)]).step == 1


_candidates = st.lists(
    st.builds(
        Candidate,
        path=st.integers(0, 10**6).map(lambda number: f"/ck/{number}"),
        step=st.one_of(st.none(), st.integers(0, 50)),
        run_id=st.sampled_from([None, "mine", "other"]),
        attempt=st.integers(0, 5),
        state=st.sampled_from(["whole", "torn", "unfinished", "writing", "unknown"]),
        sealed_kind=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda c: c.path,
)


@given(found=_candidates, first=st.booleans(), ever=st.booleans())
def test_the_choice_is_always_the_highest_whole_step_of_this_run(found: list[Candidate], first: bool, ever: bool) -> None:
    """Over any folder: never a bad, foreign or older one; never fresh while ours is whole, or was."""
    decision = choose_resume_point(found, facts(first_attempt=first, ever_whole=ever))
    good = [c for c in found if c.state == "whole" and c.sealed_kind and c.step is not None and c.run_id in ("mine", None)]
    if good:
        assert isinstance(decision, Choice)
        assert decision.step == max(c.step for c in good if c.step is not None)
    elif ever:
        assert isinstance(decision, Refusal)
    else:
        assert isinstance(decision, Refusal) or decision.path is None


@given(found=_candidates, data=st.data())
def test_the_choice_does_not_depend_on_the_order_of_the_listing(found: list[Candidate], data: st.DataObject) -> None:
    """A file system lists in any order: the decision is the same."""
    shuffled = data.draw(st.permutations(found))
    assert choose_resume_point(found, FACTS) == choose_resume_point(shuffled, FACTS)
