"""The training loop's side, in process: steps, saves, resumption, flushes of a fake supervisor."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from supervise_hooks import saving
from supervise_hooks.attaching import Wishes, open_session
from supervise_hooks.contract import env, layout, messages
from supervise_hooks.contract.errors import CheckpointError, SuperviseError
from supervise_hooks.contract.manifest import read_manifest
from supervise_hooks.session import Session
from supervise_hooks.testing import CountingState, FakeSupervisor


@contextmanager
def attached(
    checkpoints: Path, state: CountingState | None = None, environ: dict[str, str] | None = None, **wishes: Any
) -> Iterator[tuple[Session, CountingState]]:
    """A session over a counting state, closed at the end."""
    state = CountingState() if state is None else state
    session = open_session(state, Wishes(checkpoints=checkpoints, **wishes), environ or {})
    try:
        yield session, state
    finally:
        session.close()


def names(checkpoints: Path) -> list[str]:
    """Checkpoint folders there are."""
    return sorted(p.name for p in checkpoints.iterdir() if p.name.startswith("step-"))


# --- alone


def test_steps_counts_and_saves_a_final_checkpoint(tmp_path: Path) -> None:
    """The loop sees every index once, and ends with a sealed checkpoint of the last step."""
    with attached(tmp_path) as (run, state):
        seen = []
        for step in run.steps(5):
            seen.append(step)
            state.train()
    assert seen == [0, 1, 2, 3, 4]
    manifest = read_manifest(tmp_path / "step-000000005")
    assert (manifest.step, manifest.reason) == (5, "final")
    assert os.readlink(tmp_path / layout.LAST) == "step-000000005"


def test_periodic_saves_keep_the_last_ones(tmp_path: Path) -> None:
    """`every` saves at multiples and `keep` prunes the older ones, since nobody else does when alone."""
    with attached(tmp_path, every=2, keep=2) as (run, state):
        for _ in run.steps(9):
            state.train()
    assert [context.step for context in state.saves] == [2, 4, 6, 8, 9]
    assert names(tmp_path) == ["step-000000008", "step-000000009"]


def test_resuming_continues_exactly(tmp_path: Path) -> None:
    """A run cut in two draws the same random numbers and ends the same as an uninterrupted one."""
    with attached(tmp_path / "whole") as (run, whole):
        for _ in run.steps(10):
            whole.train()
    with attached(tmp_path / "cut", every=4, save_at_end=False) as (run, first):
        for _ in run.steps(6):
            first.train()
    with attached(tmp_path / "cut", resume="auto") as (run, second):
        second.draw()  # set-up may draw as it likes
        assert run.resumed and run.step == 4
        steps = []
        for step in run.steps(10):
            steps.append(step)
            second.train()
    assert steps == [4, 5, 6, 7, 8, 9]
    assert (second.count, second.rng) == (whole.count, whole.rng)


def test_auto_walks_back_over_a_torn_checkpoint(tmp_path: Path) -> None:
    """`resume="auto"` passes over a newest checkpoint with a flipped byte; naming it outright is refused when it is short."""
    with attached(tmp_path, every=2) as (run, state):
        for _ in run.steps(4):
            state.train()
    victim = tmp_path / "step-000000004" / layout.state_name(0, 1)
    content = bytearray(victim.read_bytes())
    content[5] ^= 1
    victim.write_bytes(content)
    with attached(tmp_path, resume="auto") as (run, _):
        assert run.step == 2
    victim.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="cannot resume from"), attached(tmp_path, resume=victim.parent):
        pass


def test_a_failed_save_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk costs a checkpoint, not the training, and the previous checkpoint stands."""
    with attached(tmp_path, every=2) as (run, state):
        for step in run.steps(6):
            state.train()
            state.fail_with = OSError(28, "No space left on device") if step == 3 else None
    assert names(tmp_path) == ["step-000000002", "step-000000006"]
    assert "cannot save step 4" in caplog.text and "No space left" in caplog.text


def test_what_others_sealed_is_never_written_over(tmp_path: Path) -> None:
    """A fresh run beside old checkpoints saves under another name; the old one keeps every byte."""
    for _ in range(3):
        with attached(tmp_path) as (run, state):
            for _ in run.steps(3):
                state.train()
        if len(names(tmp_path)) == 1:
            before = (tmp_path / "step-000000003" / layout.MANIFEST).read_bytes()
    assert names(tmp_path) == ["step-000000003", "step-000000003-a0002", "step-000000003-a0003"]
    assert (tmp_path / "step-000000003" / layout.MANIFEST).read_bytes() == before


def test_debris_of_a_killed_save_is_written_over(tmp_path: Path) -> None:
    """An unsealed folder at the same step does not stop a save, and what comes out is ours and whole."""
    debris = tmp_path / "step-000000002"
    debris.mkdir()
    (debris / layout.state_name(0, 1)).write_text("half")
    with attached(tmp_path) as (run, state):
        for _ in run.steps(2):
            state.train()
    assert read_manifest(debris).step == 2


def test_save_is_honoured_at_the_next_boundary(tmp_path: Path) -> None:
    """`run.save()` inside a step saves the state after that step."""
    with attached(tmp_path, save_at_end=False) as (run, state):
        for step in run.steps(4):
            if step == 1:
                run.save()
            state.train()
    assert [(c.step, c.reason) for c in state.saves] == [(2, "requested")]


def test_metric_chooses_best_and_survives_resuming(tmp_path: Path) -> None:
    """`best` names the checkpoint with the best logged value, stays after a resume, and not-a-number never wins."""
    losses = [5.0, 1.0, float("nan"), 3.0]
    with attached(tmp_path, every=1, metric="loss") as (run, state):
        for step in run.steps(4):
            state.train()
            run.log(loss=losses[step])
        assert run.best is not None and run.best.value == 1.0
    assert os.readlink(tmp_path / layout.BEST) == "step-000000002"
    with attached(tmp_path, resume="auto", metric="loss") as (run, _):
        assert run.best is not None and run.best.value == 1.0


def test_config_differences_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another learning rate on resume is said, key by key, old and new; what is equal is not."""
    caplog.set_level(logging.INFO, "supervise_hooks")
    with attached(tmp_path, config={"lr": 0.1, "model": {"width": 8}, "seed": 1}) as (run, state):
        for _ in run.steps(1):
            state.train()
    with attached(tmp_path, resume="auto", config={"lr": 0.2, "model": {"width": 9}, "seed": 1}):
        pass
    told = caplog.text
    assert "lr: 0.1 -> 0.2" in told and "model.width: 8 -> 9" in told and "seed" not in told


def test_every_save_and_resume_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path, step, loss, rate, size and time of a save are on stderr even when no logging is set up."""
    monkeypatch.setattr(logging.getLogger("supervise_hooks"), "propagate", False)  # pytest's handlers are on the root
    with attached(tmp_path) as (run, state):
        for _ in run.steps(2):
            state.train()
            run.log(loss=2.5)
    with attached(tmp_path, resume="auto"):
        pass
    saved, resumed = [line for line in capsys.readouterr().err.splitlines() if "step-000000002" in line]
    for fact in (str(tmp_path), "step 2", "loss 2.5", "lr 0.1", " B in "):
        assert fact in saved and fact in resumed


@pytest.mark.parametrize(
    ("wishes", "error"),
    [
        ({"every": 0}, SuperviseError),
        ({"every": "10"}, TypeError),
        ({"keep": 0}, SuperviseError),
        ({"metric": "best:loss"}, SuperviseError),
        ({"config": 7}, TypeError),
    ],
)
def test_misuse_is_one_clear_error(tmp_path: Path, wishes: dict[str, Any], error: type[Exception]) -> None:
    """A wrong argument is refused at attach, by name."""
    with pytest.raises(error, match=rf"cannot attach: .*{next(iter(wishes))}"), attached(tmp_path, **wishes):
        pass


def test_ranks_without_a_meeting_point_are_refused(tmp_path: Path) -> None:
    """Two ranks and no MASTER_ADDR: said at attach, not at the first flush."""
    with pytest.raises(SuperviseError, match="MASTER_ADDR"), attached(tmp_path, environ={"RANK": "0", "WORLD_SIZE": "2"}):
        pass


def test_a_stale_socket_is_refused(tmp_path: Path) -> None:
    """SUPERVISE_SOCKET of a supervisor that has ended is an error that says what to do."""
    with pytest.raises(SuperviseError, match="unset it to run alone"):
        open_session(CountingState(), Wishes(checkpoints=tmp_path), {env.SOCKET: str(tmp_path / "none")})


# --- evaluation


def test_evaluation_does_not_perturb_the_training(tmp_path: Path) -> None:
    """Random numbers drawn inside `evaluating()` leave no trace in the training, and the step is counted once."""
    ends = []
    for draws in (0, 3):
        with attached(tmp_path / str(draws)) as (run, state):
            for _ in run.steps(4):
                state.train()
                with run.evaluating():
                    for _ in range(draws):
                        state.draw()
            ends.append((run.step, state.rng))
    assert ends[0] == ends[1] and ends[0][0] == 4


def test_save_inside_an_evaluation_keeps_the_training_random_state(tmp_path: Path) -> None:
    """A checkpoint from inside an evaluation holds the state at its entry, and says that the evaluation was cut."""
    with attached(tmp_path, save_at_end=False) as (run, state):
        for _ in run.steps(3):
            state.train()
            entry = state.rng
            if run.step == 1:
                with run.evaluating():
                    state.draw()
                    run.save()
                break
    with attached(tmp_path, resume="auto") as (run, again):
        assert run.step == 2 and run.evaluation_interrupted
        for _ in run.steps(3):
            assert again.rng == entry
            again.train()
        assert not run.evaluation_interrupted


# --- supervised


def test_flush_saves_and_goes_on(tmp_path: Path) -> None:
    """A `continue` flush commits to a step, saves there, answers with its id, and training goes on to the end."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env()) as (run, state):
        asked = 0
        for step in run.steps(1_000_000):
            state.train()
            if step == 10:
                asked = boss.ask_flush("continue")
            if step > 10 and state.saves:
                run.finish()
                break
        committed = boss.wait_for(messages.Committed)
        saved = boss.wait_for(messages.Saved)
        assert saved.flush_id == committed.flush_id == asked
        assert saved.step == committed.step == state.saves[0].step
        assert read_manifest(Path(saved.path)).reason == "requested"
        run.close()
        assert boss.wait_for(messages.RunCompleted).step == run.step


def test_flush_before_the_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    """Asked during set-up, the rank answers at once and without its main thread: there is nothing new."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env()):
        boss.wait_for(messages.Hello)
        asked = boss.ask_flush("continue")
        answer = boss.wait_for(messages.NothingToSave)
        assert (answer.flush_id, answer.step) == (asked, 0)
        assert not list(tmp_path.glob("step-*"))


def test_flush_at_a_saved_step_names_the_existing_checkpoint(tmp_path: Path) -> None:
    """After the end the final checkpoint answers a flush; nothing is written again."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env()) as (run, state):
        for _ in run.steps(3):
            state.train()
        asked = boss.ask_flush("continue")
        answer = boss.wait_for(messages.Saved, count=2)
        assert (answer.flush_id, answer.step) == (asked, 3) and len(state.saves) == 1


def test_repeated_flush_is_one_flush(tmp_path: Path) -> None:
    """The same id heard again, also after it was answered, saves nothing more."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env(), save_at_end=False) as (run, state):
        for step in run.steps(60):
            state.train()
            if step == 5:
                boss.ask_flush("continue", flush_id=7)
                boss.ask_flush("continue", flush_id=7, left_s=5)
                boss.wait_for(messages.Committed)
            if step == 20:
                boss.wait_for(messages.Saved)
                boss.ask_flush("continue", flush_id=7)
                asked = boss.ask_flush("continue", flush_id=8)
                boss.wait_for(messages.Committed, count=2)
        run.close()
        boss.wait_gone()
        saved = [m.flush_id for _, m in boss.received if isinstance(m, messages.Saved)]
        assert saved == [7, asked]


def test_service_point_saves_inside_an_evaluation(tmp_path: Path) -> None:
    """A flush asked during a long evaluation is honoured at its next service point, not after it."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env(), save_at_end=False) as (run, state):
        for _ in run.steps(1):
            state.train()
            with run.evaluating():
                boss.ask_flush("continue")
                for _ in range(100_000):
                    state.draw()
                    run.service_point()
                    if state.saves:
                        break
                boss.wait_for(messages.Committed)
                run.service_point()
                inside = len(state.saves)
        assert inside == 1 and state.saves[0].step == 1
        assert state.saves[0].rng is not None


def test_failed_save_answers_the_flush(tmp_path: Path) -> None:
    """A flush whose save fails is answered with the reason, and training goes on."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env(), save_at_end=False) as (run, state):
        state.fail_with = OSError(28, "No space left on device")
        for step in run.steps(30):
            state.train()
            if step == 3:
                asked = boss.ask_flush("continue")
                boss.wait_for(messages.Committed)
        failed = boss.wait_for(messages.SaveFailed)
        assert failed.flush_id == asked and "No space left" in failed.error
        assert run.step == 30


def test_progress_is_reported(tmp_path: Path) -> None:
    """The listener thread tells step, activity and logged values without the loop's help."""
    with FakeSupervisor(tmp_path) as boss, attached(tmp_path, environ=boss.env()) as (run, state):
        for step in run.steps(5):
            state.train()
            run.log(loss=1.5, bad=float("inf"))
            if step == 3:
                boss.wait_step(3)
                seen = [m for _, m in boss.received if isinstance(m, messages.Progress)][-1]
    assert seen.values == {"loss": 1.5} and seen.activity == "training"


def test_the_hot_path_calls_nothing(tmp_path: Path) -> None:
    """Between saves a step calls no function at all, of Python or of C: no clock, no lock, no system call."""
    calls: list[Any] = []
    with attached(tmp_path, save_at_end=False) as (run, _):
        loop = run.steps(1000)
        next(loop)

        def profile(frame: Any, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                calls.append((event, frame.f_code.co_name, argument))

        sys.setprofile(profile)
        try:
            for _ in range(100):
                next(loop)
        finally:
            sys.setprofile(None)
    other = {(event, name) for event, name, _ in calls} - {("call", "steps"), ("c_call", "test_the_hot_path_calls_nothing")}
    assert not other
    assert sum(event == "call" for event, _, _ in calls) == 100


def test_of_two_ranks_that_prune_at_once_the_slower_says_nothing(tmp_path: Path) -> None:
    """C67: both saw all receipts and both prune: who comes second finds it gone, and a link is removed without what it names."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "x").write_text("kept")
    link, folder = tmp_path / "step-000000001", tmp_path / "step-000000002"
    link.symlink_to(target)
    folder.mkdir()
    assert saving._remove(folder)
    assert not saving._remove(folder)
    assert saving._remove(link)
    assert (target / "x").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere"]


@pytest.mark.torch
def test_a_loader_of_an_evaluation_can_be_shielded_too(tmp_path: Path) -> None:
    """`run.shield` gives the loader back with workers that a tree-wide SIGTERM does not end."""
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader([1, 2, 3], num_workers=1)
    with attached(tmp_path) as (run, _):
        assert run.shield(loader) is loader
    assert type(loader.worker_init_fn).__name__ == "WorkerInit"


def test_a_fresh_start_beside_checkpoints_of_this_run_is_refused_after_telling_the_folder(tmp_path: Path) -> None:
    """C31: run directory lost, folder named by the script only: the supervisor learns the folder, then the rank ends; another run's are no matter."""
    with FakeSupervisor(tmp_path) as boss:
        with attached(tmp_path, environ=boss.env()) as (run, _):
            list(run.steps(2))
        with pytest.raises(SuperviseError, match="did not know this folder"), attached(tmp_path, environ=boss.env()):
            pass
        assert boss.wait_for(messages.Hello).checkpoints == str(tmp_path)
    with FakeSupervisor(tmp_path, run_id="another") as boss, attached(tmp_path, environ=boss.env()) as (run, _):
        assert run.step == 0
