"""The keeper: what a run asks of its checkpoints, on a real folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kit.checkpoints import Saved, a_checkpoint, parts, payload
from supervise_daemon.core import events
from supervise_daemon.core.resume import Candidate, Choice
from supervise_daemon.formats.choosing import clear_away
from supervise_daemon.formats.keeper import Keeper
from supervise_daemon.job_spec import JobSpec
from supervise_hooks.contract import exit_codes, layout
from supervise_hooks.contract.retention import Retention


def a_keeper(
    base: Path, *, first: bool = False, ever_whole: bool = True, fresh: bool = False, said: list[str] | None = None
) -> Keeper:
    """The keeper of `run-1`, which keeps one checkpoint."""
    spec: Any = SimpleNamespace(fresh=fresh, run_id="run-1", retention=Retention(keep_last=1), retention_given=True)
    say = (said if said is not None else []).append
    return Keeper(spec=cast(JobSpec, spec), folder=lambda: base, facts=lambda: (first, ever_whole), clear=lambda: None, say=say)


def test_the_next_attempt_starts_from_the_newest_whole_one(tmp_path: Path) -> None:
    """What lay complete is sealed first, what is torn moved aside: the event names path, step and reason."""
    a_checkpoint(tmp_path, 10)
    complete = parts(tmp_path, 20, range(2))
    payload(a_checkpoint(tmp_path, 30)).unlink()
    answer = a_keeper(tmp_path).choose(None)
    assert isinstance(answer, events.ResumePointChosen)
    assert (answer.path, answer.step) == (str(complete), 20)
    assert "1 newer passed over" in answer.reason
    assert (tmp_path / layout.SET_ASIDE / layout.step_name(30)).is_dir()


def test_walking_back_moves_the_suspect_aside(tmp_path: Path) -> None:
    """The restart policy names a checkpoint from which attempts keep failing: the one before is chosen."""
    a_checkpoint(tmp_path, 10)
    suspect = a_checkpoint(tmp_path, 20)
    answer = a_keeper(tmp_path).choose(str(suspect))
    assert isinstance(answer, events.ResumePointChosen)
    assert answer.step == 10
    assert (tmp_path / layout.SET_ASIDE / suspect.name).is_dir()


def test_nothing_whole_is_refused_with_its_own_exit_code_and_nothing_moves(tmp_path: Path) -> None:
    """C31: the run had whole ones, now none is: exit 66, and everything lies as it was."""
    payload(a_checkpoint(tmp_path, 30)).unlink()
    answer = a_keeper(tmp_path).choose(None)
    assert isinstance(answer, events.ResumeRefused)
    assert answer.exit_code == exit_codes.NO_RESUME_POINT
    assert (tmp_path / layout.step_name(30)).is_dir()


def test_fresh_is_for_the_first_attempt_only_and_what_lay_there_is_set_aside(tmp_path: Path) -> None:
    """--fresh starts from scratch once; older checkpoints are moved, not deleted; after a crash the run goes on from what it saved since."""
    a_checkpoint(tmp_path, 500)
    foreign = a_checkpoint(tmp_path, 700, Saved(run_id="another"))
    keeper = a_keeper(tmp_path, fresh=True)
    answer = keeper.choose(None)
    assert isinstance(answer, events.ResumePointChosen)
    assert answer.path is None
    assert (tmp_path / layout.SET_ASIDE / layout.step_name(500) / layout.MANIFEST).exists()
    assert foreign.is_dir()
    a_checkpoint(tmp_path, 10, Saved(attempt=2))
    answer = keeper.choose(None)
    assert isinstance(answer, events.ResumePointChosen)
    assert answer.step == 10


def test_another_runs_checkpoints_are_said_once_with_how_to_adopt_them(tmp_path: Path) -> None:
    """C69: a fresh start, and one line for the user."""
    a_checkpoint(tmp_path, 700, Saved(run_id="old"))
    said: list[str] = []
    answer = a_keeper(tmp_path, first=True, ever_whole=False, said=said).choose(None)
    assert isinstance(answer, events.ResumePointChosen)
    assert answer.path is None
    assert len(said) == 1
    assert "--resume" in said[0]


def test_the_preview_changes_nothing(tmp_path: Path) -> None:
    """--dry-run shows the choice and moves nothing."""
    a_checkpoint(tmp_path, 10)
    payload(a_checkpoint(tmp_path, 20)).unlink()
    path, reason = a_keeper(tmp_path).preview()
    assert path == str(tmp_path / layout.step_name(10))
    assert "passed over" in reason
    assert (tmp_path / layout.step_name(20)).is_dir()


def test_pruning_keeps_what_the_attempt_runs_from(tmp_path: Path) -> None:
    """Keep 1, but the attempt's own starting point stays until the next one."""
    for step in (10, 20):
        a_checkpoint(tmp_path, step)
    keeper = a_keeper(tmp_path)
    keeper.choose(None)
    for step in (30, 40):
        newest = a_checkpoint(tmp_path, step)
    keeper.prune(str(newest))
    assert {path.name for path in tmp_path.iterdir()} == {layout.step_name(20), layout.step_name(40)}


def test_one_that_could_not_be_read_just_now_is_not_moved(tmp_path: Path) -> None:
    """A filesystem that answers EIO today may answer tomorrow: such a checkpoint is passed over where it is."""
    folder = a_checkpoint(tmp_path, 20)
    problem = "rank-00000-of-00002.safetensors cannot be read: Input/output error"
    candidate = Candidate(path=str(folder), step=20, run_id="run-1", state="torn", problems=(problem,))
    clear_away([candidate], Choice(path=None, step=None, reason=""), "run-1", lambda text: None)
    assert folder.is_dir()
