"""A real folder of checkpoints: what is found in it, which is chosen, what is moved aside, sealed late or pruned."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kit.checkpoints import Saved, a_checkpoint, edit_manifest, mark_writing, parts, payload, read, tensor_bytes
from supervise_daemon.core.resume import Choice, Refusal, ResumeFacts
from supervise_daemon.formats import catalog, tending
from supervise_daemon.formats.choosing import Look, clear_away, decide
from supervise_hooks.contract import layout
from supervise_hooks.contract.identity import identify
from supervise_hooks.contract.manifest import Metric
from supervise_hooks.contract.retention import Retention

KEEP_1 = Retention(keep_last=1)


def choose(base: Path, look: Look | None = None, **changes: Any) -> Choice | Refusal:
    """What a later attempt of `run-1`, which has had a whole checkpoint, starts from."""
    facts = ResumeFacts(
        run_id="run-1", folder=catalog.folder_state(base), folder_path=str(base), first_attempt=False, ever_whole=True
    )
    facts = msgspec.structs.replace(facts, **changes)
    return decide(base, facts, look or Look())[0]


def chosen_step(base: Path, look: Look | None = None) -> int | None:
    """Step of the choice."""
    decision = choose(base, look)
    assert isinstance(decision, Choice), decision
    return decision.step


def choose_and_clear(base: Path) -> tuple[Choice, list[str]]:
    """Choose, then move torn ones aside; the choice and what was said."""
    said: list[str] = []
    facts = ResumeFacts(run_id="run-1", folder="ok", folder_path=str(base), first_attempt=False, ever_whole=True)
    decision, candidates = decide(base, facts, Look())
    assert isinstance(decision, Choice)
    clear_away(candidates, decision, "run-1", said.append)
    return decision, said


def zero_payload(folder: Path) -> None:
    """Zeros where tensor data was; only a digest can tell."""
    path = payload(folder)
    path.write_bytes(path.read_bytes()[:-64] + bytes(64))


def names(base: Path) -> set[str]:
    """What lies in a folder."""
    return set(os.listdir(base))


# choosing


def test_an_incomplete_newer_one_is_never_taken(tmp_path: Path) -> None:
    """C21: five stages of a save cut short, each beside a whole step 10: it is chosen, each is named, nothing is gone."""
    a_checkpoint(tmp_path, 10)
    (tmp_path / "step-000000020").mkdir()
    parts(tmp_path, 30, range(1))
    parts(tmp_path, 40, range(2))
    payload(a_checkpoint(tmp_path, 50), rank=1).unlink()
    parts(tmp_path, 60, range(2), Saved(name=".tmp-step-000000060"))
    before = names(tmp_path)
    decision = choose(tmp_path)
    assert isinstance(decision, Choice)
    assert decision.step == 10
    assert [Path(path).name for path, _ in decision.passed_over] == [layout.step_name(step) for step in (50, 40, 30, 20)]
    assert names(tmp_path) == before


def test_full_proof_walks_down_until_one_holds(tmp_path: Path) -> None:
    """C24: the two newest are zeroed inside with right sizes; the third is the choice, and both are named."""
    for step in (10, 20, 30):
        a_checkpoint(tmp_path, step)
    for step in (20, 30):
        zero_payload(tmp_path / layout.step_name(step))
    decision = choose(tmp_path)
    assert isinstance(decision, Choice)
    assert (decision.step, len(decision.passed_over)) == (10, 2)
    assert "other content" in decision.passed_over[0][1]


def test_only_what_may_be_chosen_is_read_in_full(tmp_path: Path) -> None:
    """Proof costs the bytes of the newest one, not of the whole folder."""
    for step in (10, 20, 30):
        a_checkpoint(tmp_path, step)
    seen: list[int] = []
    assert chosen_step(tmp_path, Look(on_bytes=seen.append)) == 30
    assert sum(seen) == read(tmp_path / layout.step_name(30)).size


def test_dates_and_names_never_decide(tmp_path: Path) -> None:
    """C29, C30: step 1000 is the choice though 999 has tomorrow's date, and 10 bears a bigger name."""
    a_checkpoint(tmp_path, 1000)
    a_checkpoint(tmp_path, 999)
    a_checkpoint(tmp_path, 10, Saved(name="step-000099999"))
    tomorrow = time.time() + 86400
    os.utime(tmp_path / layout.step_name(999), (tomorrow, tomorrow))
    os.utime(tmp_path / layout.step_name(1000), (0, 0))
    assert chosen_step(tmp_path) == 1000


def test_an_emergency_checkpoint_has_no_precedence(tmp_path: Path) -> None:
    """C32: emergency at 15, periodic at 40: 40 wins."""
    a_checkpoint(tmp_path, 15, Saved(reason="emergency"))
    a_checkpoint(tmp_path, 40)
    assert chosen_step(tmp_path) == 40


@pytest.mark.parametrize("target", ["step-000000020", "gone", "../../etc", "last"])
def test_pointers_are_no_evidence(tmp_path: Path, target: str) -> None:
    """C33, C77: `last` names an older one, nothing, a place outside, or itself: the newest whole one is chosen."""
    a_checkpoint(tmp_path, 20)
    a_checkpoint(tmp_path, 40)
    for name in (layout.LAST, layout.BEST):
        (tmp_path / name).symlink_to(target)
    assert chosen_step(tmp_path) == 40


def test_a_save_in_flight_is_not_chosen_nor_moved(tmp_path: Path) -> None:
    """C26: one rank is done, another is writing now: the older one is chosen and the one in flight stays where it is."""
    a_checkpoint(tmp_path, 10)
    folder = parts(tmp_path, 20, range(1))
    mark_writing(folder, 1, 2, identify())
    decision, said = choose_and_clear(tmp_path)
    assert (decision.step, decision.passed_over) == (10, ((str(folder), "it is being written"),))
    assert said == []
    assert folder.is_dir()


def test_another_runs_leftovers_are_neither_chosen_nor_touched(tmp_path: Path) -> None:
    """C69: steps 500 to 700 of an old run, whole, torn and complete but unsealed: untouched by choosing, sealing and pruning."""
    old = Saved(run_id="old")
    a_checkpoint(tmp_path, 500, old)
    payload(a_checkpoint(tmp_path, 600, old)).unlink()
    parts(tmp_path, 700, range(2), old)
    a_checkpoint(tmp_path, 100)
    before = {str(path) for path in tmp_path.rglob("*")}
    said: list[str] = []
    tending.seal_ready(tmp_path, "run-1", said.append)
    decision, more = choose_and_clear(tmp_path)
    assert tending.prune(tmp_path, KEEP_1, "run-1") == []
    assert decision.step == 100
    assert said + more == []
    assert {str(path) for path in tmp_path.rglob("*")} == before


def test_a_shard_that_shows_up_a_moment_later_is_waited_for(tmp_path: Path) -> None:
    """C23: the newest one lacks a file at first; within the bound it is looked at again, and chosen."""
    a_checkpoint(tmp_path, 10)
    shard = payload(a_checkpoint(tmp_path, 20), rank=1)
    hidden = shard.rename(tmp_path / ".hidden")
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 2.0 and hidden.exists():
            hidden.rename(shard)

    assert chosen_step(tmp_path, Look(relook_s=3.0, pause=pause, clock=lambda: now[0])) == 20
    assert 2.0 <= now[0] < 3.0


def test_the_second_look_is_bounded(tmp_path: Path) -> None:
    """C23: a shard that never comes costs three seconds, then the older one is taken."""
    a_checkpoint(tmp_path, 10)
    payload(a_checkpoint(tmp_path, 20), rank=1).unlink()
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    assert chosen_step(tmp_path, Look(relook_s=3.0, pause=pause, clock=lambda: now[0])) == 10
    assert 3.0 <= now[0] < 3.5


def test_what_cannot_get_better_is_not_waited_for(tmp_path: Path) -> None:
    """A save cut short by a kill, a torn file, another run's missing file: chosen without a pause, restarts stay quick."""
    a_checkpoint(tmp_path, 10)
    parts(tmp_path, 20, range(1))
    os.truncate(payload(a_checkpoint(tmp_path, 30)), 5)
    payload(a_checkpoint(tmp_path, 40, Saved(run_id="old"))).unlink()

    def pause(seconds: float) -> None:
        raise AssertionError("paused")

    assert chosen_step(tmp_path, Look(relook_s=3.0, pause=pause)) == 10


def test_a_checkpoint_of_another_world_size_is_whole(tmp_path: Path) -> None:
    """C36: saved by four, looked at for two: chosen, with a note."""
    a_checkpoint(tmp_path, 20, Saved(world_size=4))
    decision = choose(tmp_path, world_size=2)
    assert isinstance(decision, Choice)
    assert (decision.step, "saved by 4 ranks, started with 2" in decision.notes[0]) == (20, True)


# what a folder can be


def test_states_of_the_folder_itself(tmp_path: Path) -> None:
    """C31: absent, empty, no folder and unreadable are four different things."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    states = {name: catalog.folder_state(tmp_path / name) for name in ("absent", "empty", "file", "loop", ".")}
    assert states == {"absent": "absent", "empty": "empty", "file": "not a folder", "loop": "unreadable", ".": "ok"}
    assert isinstance(choose(tmp_path / "loop"), Refusal)


def test_a_wrong_folder_full_of_other_things_starts_fresh(tmp_path: Path) -> None:
    """`--checkpoints /etc` by mistake, on a first attempt: nothing is taken for a checkpoint."""
    decision = choose(Path("/etc"), first_attempt=True, ever_whole=False)
    assert isinstance(decision, Choice)
    assert (decision.path, decision.notes) == (None, ())


def test_junk_of_every_kind_is_survived(tmp_path: Path) -> None:
    """Names with newlines, bytes that are no UTF-8, deep trees, pipes, loops, files under step names: the whole one is found."""
    a_checkpoint(tmp_path, 20)
    (tmp_path / "step-000000030").write_bytes(b"a file")
    (tmp_path / "step-000000040").symlink_to("step-000000040")
    (tmp_path / "step-99999999999999999999").mkdir()
    (tmp_path / "new\nline [red].pt").write_bytes(b"x")
    os.mkdir(os.fsencode(tmp_path) + b"/step-\xff\xfe")
    (tmp_path / Path(*["deep"] * 200)).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe.pt")
    os.mkfifo(tmp_path / "step-000000050")
    assert chosen_step(tmp_path) == 20


def test_thirty_thousand_entries_are_listed_in_bounded_time(tmp_path: Path) -> None:
    """A folder used for other things too: the one checkpoint among many files is found, wherever the listing has it."""
    for number in range(30_000):
        os.close(os.open(tmp_path / f"f{number}", os.O_CREAT | os.O_WRONLY))
    a_checkpoint(tmp_path, 20)
    began = time.process_time()
    assert [found.candidate.step for found in catalog.scan(tmp_path)] == [20]
    assert time.process_time() - began < 10


def test_other_formats_are_listed_with_numbers_from_their_names(tmp_path: Path) -> None:
    """Newest step first over all formats, by number."""
    a_checkpoint(tmp_path, 20)
    (tmp_path / "model_step_1000.safetensors").write_bytes(tensor_bytes(1, 0, 1))
    (tmp_path / "model_step_999.safetensors").write_bytes(tensor_bytes(1, 0, 1))
    found = catalog.scan(tmp_path)
    assert [item.candidate.step for item in found] == [1000, 999, 20]
    assert chosen_step(tmp_path) == 20


# moving aside


def test_torn_ones_on_the_way_are_moved_never_deleted(tmp_path: Path) -> None:
    """The torn newest lies in set-aside with all its files; unfinished ones and older ones stay."""
    payload(a_checkpoint(tmp_path, 5), rank=1).unlink()
    a_checkpoint(tmp_path, 10)
    parts(tmp_path, 15, range(1))
    torn = a_checkpoint(tmp_path, 20)
    zero_payload(torn)
    files = names(torn)
    decision, said = choose_and_clear(tmp_path)
    assert decision.step == 10
    assert names(tmp_path) == {layout.step_name(step) for step in (5, 10, 15)} | {layout.SET_ASIDE}
    assert names(tmp_path / layout.SET_ASIDE / torn.name) == files
    assert len(said) == 1
    assert "other content" in said[0]


def test_a_damaged_manifest_is_moved_only_if_its_receipts_are_ours(tmp_path: Path) -> None:
    """Whose it is, is told by the receipts; without a word of evidence it stays."""
    a_checkpoint(tmp_path, 10)
    for step, run in ((20, "run-1"), (30, "old"), (40, "run-1")):
        os.truncate(a_checkpoint(tmp_path, step, Saved(run_id=run)) / layout.MANIFEST, 20)
    for receipt in (tmp_path / layout.step_name(40)).glob("*.receipt.json"):
        receipt.unlink()
    decision, _ = choose_and_clear(tmp_path)
    assert decision.step == 10
    assert names(tmp_path / layout.SET_ASIDE) == {layout.step_name(20)}


def test_setting_aside_twice_keeps_both(tmp_path: Path) -> None:
    """The same step torn again and again: no evidence is overwritten."""
    for _ in range(3):
        tending.set_aside(a_checkpoint(tmp_path, 20), lambda text: None, "test")
    assert names(tmp_path / layout.SET_ASIDE) == {"step-000000020", "step-000000020.2", "step-000000020.3"}


def test_failing_to_move_is_a_note(tmp_path: Path) -> None:
    """The place is taken by a file: it is said, the checkpoint stays, and the choice stands."""
    (tmp_path / layout.SET_ASIDE).write_bytes(b"")
    a_checkpoint(tmp_path, 10)
    zero_payload(a_checkpoint(tmp_path, 20))
    decision, said = choose_and_clear(tmp_path)
    assert decision.step == 10
    assert "cannot set" in said[0]
    assert (tmp_path / layout.step_name(20)).is_dir()


def test_a_linked_checkpoint_is_verified_through_and_moved_as_a_link(tmp_path: Path) -> None:
    """C70: what it points at elsewhere is judged, and is never moved or removed."""
    base, elsewhere = tmp_path / "ck", tmp_path / "elsewhere"
    a_checkpoint(base, 10)
    real = a_checkpoint(elsewhere, 20)
    (base / real.name).symlink_to(real)
    assert chosen_step(base) == 20
    zero_payload(real)
    decision, _ = choose_and_clear(base)
    assert decision.step == 10
    assert (base / layout.SET_ASIDE / real.name).is_symlink()
    assert names(real) >= {layout.MANIFEST}
    (base / real.name).symlink_to(real)  # the second preemption can make it again
    assert chosen_step(base) == 10


# sealing late


def test_a_complete_one_is_sealed_at_the_next_start(tmp_path: Path) -> None:
    """Its last rank was killed between its receipt and the manifest: nothing is lost."""
    a_checkpoint(tmp_path, 10)
    parts(tmp_path, 20, range(2))
    parts(tmp_path, 30, range(1))
    os.truncate(payload(parts(tmp_path, 40, range(2))), 3)
    said: list[str] = []
    tending.seal_ready(tmp_path, "run-1", said.append)
    assert said == ["sealed step-000000020: all its receipts were there"]
    assert chosen_step(tmp_path) == 20


# retention


def test_the_highest_steps_stay_while_crossing_a_power_of_ten(tmp_path: Path) -> None:
    """C65: keep 3 from 800 to 1200: at every moment the three highest are there, never by text."""
    for step in range(800, 1300, 100):
        a_checkpoint(tmp_path, step)
        assert tending.prune(tmp_path, Retention(keep_last=3), "run-1") == []
        assert names(tmp_path) == {layout.step_name(kept) for kept in range(max(800, step - 200), step + 1, 100)}


def test_unfinished_and_torn_newer_ones_do_not_push_out_the_last_whole(tmp_path: Path) -> None:
    """C64, C66: keep 1, while newer saves failed, are torn or in flight: the whole one stays, they are not deleted."""
    a_checkpoint(tmp_path, 20)
    parts(tmp_path, 30, range(1))
    payload(a_checkpoint(tmp_path, 40)).unlink()
    mark_writing(parts(tmp_path, 50, range(1)), 1, 2, identify())
    before = names(tmp_path)
    assert tending.prune(tmp_path, KEEP_1, "run-1") == []
    assert names(tmp_path) == before
    assert chosen_step(tmp_path) == 20


def test_in_use_best_and_every_nth_stay(tmp_path: Path) -> None:
    """The one an attempt runs from (however its path is spelled), the best by metric, and the multiples that were asked for."""
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, 2.6)):
        a_checkpoint(tmp_path, step, Saved(metric=Metric("loss", loss, "min")))
    spelled = f"{tmp_path}/../{tmp_path.name}/{layout.step_name(10)}"
    tending.prune(tmp_path, Retention(keep_last=1, keep_every=40), "run-1", frozenset({spelled}))
    assert names(tmp_path) == {layout.step_name(step) for step in (10, 20, 40, 50)}


def test_links_are_unlinked_and_never_followed(tmp_path: Path) -> None:
    """C70: a link due for pruning goes, what it points at stays; links inside a pruned folder are not followed either."""
    base, elsewhere = tmp_path / "ck", tmp_path / "elsewhere"
    real = a_checkpoint(elsewhere, 10)
    base.mkdir()
    (base / real.name).symlink_to(real)
    (a_checkpoint(base, 20) / "notes").symlink_to(elsewhere)
    a_checkpoint(base, 30)
    before = names(real)
    assert tending.prune(base, KEEP_1, "run-1") == []
    assert names(base) == {layout.step_name(30)}
    assert names(real) == before


def test_what_a_kept_link_leads_to_stays(tmp_path: Path) -> None:
    """C70: a link of a user's own, or a newest step that is a link, protects the folder that it names."""
    old, target = a_checkpoint(tmp_path, 10), a_checkpoint(tmp_path, 20)
    (tmp_path / "important").symlink_to(old.name)
    (tmp_path / "step-000000020-a0002").symlink_to(target.name)
    a_checkpoint(tmp_path, 5)
    assert tending.prune(tmp_path, KEEP_1, "run-1") == []
    assert {old.name, target.name} <= names(tmp_path)
    assert layout.step_name(5) not in names(tmp_path)
    assert chosen_step(tmp_path) == 20


def test_a_removal_that_fails_is_a_note_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C67: one file cannot be removed now: the checkpoint's name is gone at once, the rest of it at the next pruning."""
    a_checkpoint(tmp_path, 10)
    a_checkpoint(tmp_path, 20)
    unlink = os.unlink

    def stubborn(path: Any, **more: Any) -> None:
        if "rank-00001" in str(path):
            raise PermissionError(13, "Permission denied")
        unlink(path, **more)

    monkeypatch.setattr(os, "unlink", stubborn)
    notes = tending.prune(tmp_path, KEEP_1, "run-1")
    assert "trying again later" in notes[0]
    assert layout.step_name(10) not in names(tmp_path)
    assert any(name.startswith(".pruned-") for name in names(tmp_path))
    monkeypatch.undo()
    assert tending.prune(tmp_path, KEEP_1, "run-1") == []
    assert names(tmp_path) == {layout.step_name(20)}


def test_old_temporaries_go_young_and_strange_ones_stay(tmp_path: Path) -> None:
    """What an interrupted rename left is removed after ten minutes; one just being made, and other files, stay."""
    a_checkpoint(tmp_path, 20)
    for name, age_s in ((".tmp-last.0011aabb", 3600), (".tmp-best.0011aabb", 0), (".tmp-mine", 3600)):
        (tmp_path / name).symlink_to("x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2, follow_symlinks=False)
    tending.prune(tmp_path, KEEP_1, "run-1")
    assert names(tmp_path) == {layout.step_name(20), ".tmp-best.0011aabb", ".tmp-mine"}


def test_two_pruners_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """C67: both see the same victims; none complains, the newest stays, nothing is left."""
    for step in range(10, 200, 10):
        a_checkpoint(tmp_path, step)
    notes: list[str] = []
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait()
        notes.extend(tending.prune(tmp_path, KEEP_1, "run-1"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tending.prune(tmp_path, KEEP_1, "run-1")
    assert notes == []
    assert names(tmp_path) == {layout.step_name(190)}


def test_pruning_a_folder_that_is_gone_is_a_note(tmp_path: Path) -> None:
    """Never an exception into a run that goes well."""
    assert "cannot prune" in tending.prune(tmp_path / "gone", KEEP_1, "run-1")[0]


def test_a_manifest_of_a_future_schema_is_left_alone_by_pruning(tmp_path: Path) -> None:
    """What this version cannot judge it does not delete."""
    edit_manifest(a_checkpoint(tmp_path, 10), schema=99)
    a_checkpoint(tmp_path, 20)
    a_checkpoint(tmp_path, 30)
    tending.prune(tmp_path, KEEP_1, "run-1")
    assert names(tmp_path) == {layout.step_name(10), layout.step_name(30)}
