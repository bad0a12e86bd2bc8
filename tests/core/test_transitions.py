"""The important ways through the machine, one story each."""

import msgspec
import pytest

from kit.builders import Story, a_notice
from supervise_daemon.core import events, machine
from supervise_daemon.core.commands import (
    AskFlush,
    AskLeave,
    CheckCheckpoint,
    ChooseResumePoint,
    Finish,
    KillTree,
    Prune,
    Requeue,
    Spawn,
    Tell,
    TermTree,
)
from supervise_daemon.core.job import Job, Limits, Phase
from supervise_daemon.core.restart import FailureReport, RestartPolicy


def ended(story: Story) -> tuple[str | None, int | None]:
    """How the job ended; and Finish said the same, once."""
    assert story.job.phase is Phase.ENDED
    assert [finish.exit_code for finish in story.sent(Finish)] == [story.job.exit_code]
    return story.job.outcome, story.job.exit_code


# --- to the end by itself


def test_transition_settling_to_ended_when_every_rank_completed() -> None:
    """A job that runs to its end exits 0, with one launch and no requeue."""
    story = Story().running(at=9).tell(*(events.RankCompleted(rank=rank, step=10) for rank in range(2)))
    story.emptied(0, 0, 1).settled()
    assert ended(story) == ("SUCCEEDED", 0)
    assert len(story.sent(Spawn)) == 1 and not story.sent(Requeue)


def test_transition_settling_to_ended_when_an_unhooked_command_exits_0() -> None:
    """Without hooks, exit 0 and no notice is success."""
    assert ended(Story().launched().emptied(0).settled()) == ("SUCCEEDED", 0)


def test_transition_starting_to_running_when_the_last_rank_attaches() -> None:
    """One rank of two is not yet RUNNING."""
    story = Story().launched().tell(events.RankAttached(rank=1, world_size=2))
    assert story.job.phase is Phase.STARTING
    assert story.tell(events.RankAttached(rank=0, world_size=2)).job.phase is Phase.RUNNING


def test_transition_starting_to_running_when_nobody_attaches_in_time() -> None:
    """An unhooked job runs; the user is told what that means."""
    story = Story().launched().fire("attach")
    assert story.job.phase is Phase.RUNNING and "SIGTERM" in story.sent(Tell)[-1].text


def test_transition_starting_to_ended_when_the_command_cannot_start() -> None:
    """A typo in the command is not tried again."""
    story = Story().tell(events.Begun()).fire("relaunch").answer(events.ResumePointChosen, path=None, step=None, reason="fresh")
    assert ended(story.tell(events.SpawnFailed(error="no such file", exit_code=127))) == ("FAILED", 127)


def test_transition_waiting_to_ended_when_no_checkpoint_may_be_resumed() -> None:
    """A refusal to choose launches nothing and gives its own code."""
    story = Story().tell(events.Begun()).fire("relaunch").answer(events.ResumeRefused, reason="none is whole", exit_code=66)
    assert ended(story) == ("FAILED", 66) and not story.sent(Spawn)


# --- preemption


def flushing(story: Story, action: events.Action = "preempt", grace_s: float = 30.0) -> Story:
    """RUNNING at step 7, then a notice."""
    return story.running(at=7).tell(a_notice(action, grace_s, exit_code=130 if action == "stop" else 143))


def left(story: Story) -> Story:
    """From FLUSHING to SETTLING: both ranks save step 8, it is whole, they leave."""
    return story.saved(0, 1, step=8).checked(8).emptied(1, 0, 1)


def test_transition_running_to_ended_when_preempted() -> None:
    """TERM: flush, verify, leave, tree empty, requeue, 75, in that order; nothing is terminated or killed on the way."""
    story = (
        left(flushing(Story()))
        .settled(newest_step=8)
        .answer(events.RequeueEnded, accepted=True, relaunch_in_s=None, detail="handed back")
    )
    assert ended(story) == ("REQUEUED", 75)
    order = [type(command) for command in story.commands if isinstance(command, AskFlush | CheckCheckpoint | AskLeave | Requeue)]
    assert order == [AskFlush, CheckCheckpoint, AskLeave, Requeue]
    assert not story.sent(TermTree) and not story.sent(KillTree)
    assert story.phases[2:] == [
        Phase.RUNNING,
        Phase.FLUSHING,
        Phase.STOPPING,
        Phase.SETTLING,
        Phase.REQUEUEING,
        Phase.ENDED,
    ]


def test_transition_flushing_to_stopping_only_when_the_check_is_answered() -> None:
    """Receipts alone are not enough: ranks leave when the checkpoint is proved whole, and it is then that older ones may go."""
    story = flushing(Story()).saved(0, step=8)
    assert not story.sent(CheckCheckpoint)
    story.saved(1, step=8)
    assert story.job.phase is Phase.FLUSHING and not story.sent(AskLeave) and not story.sent(Prune)
    story.checked(8)
    assert story.job.phase is Phase.STOPPING and story.sent(Prune) == [Prune(newest="step-8")]


@pytest.mark.parametrize("trouble", ["not whole", "save failed", "no agreement", "too slow"])
def test_transition_flushing_to_stopping_when_the_flush_fails(trouble: str) -> None:
    """Whatever goes wrong, ranks are asked to leave, the job is requeued, and the user hears which checkpoint stands."""
    story = Story().running("step-5", 5, at=7).tell(a_notice())
    assert story.job.flush is not None
    flush_id = story.job.flush.flush_id
    if trouble == "not whole":
        story.saved(0, 1, step=8).checked(8, whole=False)
    elif trouble == "save failed":
        story.saved(0, step=8).tell(events.RankSaveFailed(rank=1, flush_id=flush_id, step=8, error="disk full"))
    elif trouble == "no agreement":
        story.tell(events.RankCommitted(rank=0, flush_id=flush_id, step=None, why="rank 1 is silent"))
    else:
        story.saved(0, step=8).fire("flush")
    assert story.job.phase is Phase.STOPPING and len(story.sent(AskLeave)) == 1
    assert "the checkpoint of step 5 stands" in story.sent(Tell)[-1].text
    assert story.emptied(1, 0, 1).settled(newest_step=5).job.phase is Phase.REQUEUEING


def test_transition_requeueing_to_waiting_when_the_backend_relaunches_here() -> None:
    """Local requeue: the next attempt starts here after the pause, and the obeyed notice is forgotten."""
    story = left(flushing(Story())).settled(newest_step=8)
    story.answer(events.RequeueEnded, accepted=True, relaunch_in_s=2.0, detail="here")
    assert story.job.phase is Phase.WAITING and story.job.notice is None
    assert story.running("step-8", 8, at=9).job.attempt == 2
    assert story.sent(Spawn)[-1].resume == "step-8" and story.job.crashes == () and story.job.preemptions == 1


def test_transition_requeueing_to_ended_when_the_backend_never_answers() -> None:
    """Our exit code still says what is wanted."""
    assert ended(left(flushing(Story())).settled().fire("requeue")) == ("REQUEUED", 75)


def test_transition_waiting_to_requeueing_when_a_notice_comes_between_attempts() -> None:
    """During a backoff the notice is honoured at once, and a choice that was under way launches nothing."""
    story = Story().running(at=5).crashed()
    story.fire("relaunch")
    choice = events.ResumePointChosen(ticket=story.job.ticket, path=None, step=None, reason="fresh")
    story.tell(a_notice())
    assert story.job.phase is Phase.REQUEUEING and len(story.sent(Requeue)) == 1
    story.tell(choice)
    assert len(story.sent(Spawn)) == 1
    story.answer(events.RequeueEnded, accepted=True, relaunch_in_s=1.0, detail="here")
    assert story.launched().job.attempt == 2


# --- more than one notice


def test_transition_flushing_to_flushing_when_a_second_term_is_nearer() -> None:
    """The flush under way gets less time; it is the same flush, and what was saved counts."""
    story = flushing(Story(), grace_s=30.0).saved(0, step=8).advance(1.0).tell(a_notice(grace_s=4.0))
    first, second = story.sent(AskFlush)
    assert first.flush_id == second.flush_id and second.deadline < story.now + 4.0 < first.deadline
    story.saved(1, step=8).checked(8)
    assert story.job.phase is Phase.STOPPING


def test_transition_flushing_to_flushing_when_a_second_term_is_later() -> None:
    """The same signal again gives no more time and asks nobody again."""
    story = flushing(Story(), grace_s=30.0)
    due = story.job.due
    story.advance(5.0).tell(a_notice(grace_s=30.0))
    assert len(story.sent(AskFlush)) == 1 and story.job.due == due


def test_transition_flushing_to_running_when_the_flush_was_to_go_on() -> None:
    """USR2: saved, verified, and training goes on with no timer armed; the verb's success is remembered."""
    story = flushing(Story(), "flush").saved(0, 1, step=8).checked(8)
    assert story.job.phase is Phase.RUNNING and story.timer is None and story.job.flush_ok
    assert story.sent(AskFlush)[0].purpose == "continue" and not story.sent(AskLeave)


def test_transition_flushing_to_running_when_a_flush_to_go_on_fails() -> None:
    """A failed `flush` costs nothing but is not called a success."""
    story = flushing(Story(), "flush").fire("flush")
    assert story.job.phase is Phase.RUNNING and not story.job.flush_ok


def test_transition_flushing_to_stopping_when_a_preemption_overtakes_a_flush_to_go_on() -> None:
    """The ranks are asked again, to leave, and a check of the first flush does not end the second."""
    story = flushing(Story(), "flush").saved(0, 1, step=8)
    old_check = events.CheckpointChecked(ticket=story.job.ticket, path="step-8", step=8, whole=True, reason="")
    story.tell(a_notice())
    assert [ask.purpose for ask in story.sent(AskFlush)] == ["continue", "leave"]
    story.saved(0, step=8).tell(old_check)
    assert story.job.phase is Phase.FLUSHING and story.job.newest_step == 8
    assert story.saved(1, step=8).checked(8).job.phase is Phase.STOPPING


def test_transition_flushing_to_stopping_when_a_rank_is_lost_after_saving_in_a_flush_to_go_on() -> None:
    """A receipt excuses a rank's end only when it was told to leave."""
    story = flushing(Story(), "flush").saved(0, step=8).tell(events.RankLost(rank=0))
    assert story.job.phase is Phase.STOPPING and story.timer is not None and story.timer.name == "stop"


def test_transition_flushing_to_flushing_when_a_rank_leaves_after_saving() -> None:
    """In a flush that ends the attempt, the others are still waited for."""
    story = flushing(Story()).saved(0, step=8).tell(events.RankLost(rank=0))
    assert story.job.phase is Phase.FLUSHING


def test_transition_flushing_to_ended_when_a_user_stops_a_preempted_job() -> None:
    """Stop is graver: saved and verified, but not handed back; the code is the stop's."""
    story = flushing(Story()).tell(a_notice("stop", exit_code=130))
    assert ended(left(story).settled(newest_step=8)) == ("STOPPED", 130)
    assert not story.sent(Requeue) and len(story.sent(AskFlush)) == 1


def test_transition_running_to_ended_when_a_user_stops() -> None:
    """Stop saves first."""
    story = left(flushing(Story(), "stop")).settled(newest_step=8)
    assert ended(story) == ("STOPPED", 130) and story.sent(CheckCheckpoint)[0].step == 8


@pytest.mark.parametrize(
    ("accepted", "relaunch_in_s"), [(True, 1.0), (True, None), (False, None)], ids=["here", "handed back", "refused"]
)
def test_transition_requeueing_to_ended_when_a_user_stops(accepted: bool, relaunch_in_s: float | None) -> None:
    """A stop while the job is handed back: neither launched here, nor code 75 that would have it run again."""
    story = left(flushing(Story())).settled().tell(a_notice("stop", exit_code=130))
    story.answer(events.RequeueEnded, accepted=accepted, relaunch_in_s=relaunch_in_s, detail="?")
    assert ended(story) == ("STOPPED", 130) and len(story.sent(Spawn)) == 1


def test_transition_requeueing_to_ended_when_a_user_stops_and_the_backend_is_silent() -> None:
    """The same without an answer."""
    assert ended(left(flushing(Story())).settled().tell(a_notice("stop", exit_code=130)).fire("requeue")) == ("STOPPED", 130)


def test_transition_stopping_to_stopping_when_notices_keep_coming() -> None:
    """Notices while ranks leave never postpone the kill, and a nearer deadline brings it forward."""
    story = flushing(Story()).saved(0, 1, step=8).checked(8)
    due = story.job.due
    assert due is not None
    for _ in range(3):
        story.advance(1.0).tell(a_notice(grace_s=30.0))
    assert story.job.due == due and not story.sent(KillTree)
    story.tell(a_notice(grace_s=0.5))
    assert story.job.due == story.now + 0.5


@pytest.mark.parametrize("where", ["waiting", "starting", "stopping", "settling", "requeueing", "completed"])
def test_transition_to_itself_when_a_flush_cannot_be_done(where: str) -> None:
    """`flush` where nothing can be saved says so, fails the verb even after an earlier success, and changes no phase."""
    story = flushing(Story(), "flush").saved(0, 1, step=8).checked(8)
    if where == "completed":
        story.tell(*(events.RankCompleted(rank=rank, step=9) for rank in range(2)))
    elif where in ("settling", "requeueing"):
        story.tell(a_notice()).saved(0, 1, step=9).checked(9).emptied(1, 0, 1)
    elif where == "stopping":
        story.tell(events.RankLost(rank=0))
    else:
        story.tell(events.RankFailed(rank=0, step=8, error="E")).emptied(1, 0, 1).settled()
    if where == "requeueing":
        story.settled()
    elif where == "starting":
        story.launched()
    phase = story.job.phase
    story.tell(a_notice("flush"))
    assert story.job.phase is phase and not story.job.flush_ok
    assert [type(command) for command in story.last] == [Tell] and "cannot flush" in story.reason


# --- completion meets a notice


def test_transition_running_to_stopping_when_a_notice_finds_every_rank_completed() -> None:
    """Nobody is left in a loop that could answer: the job gets the grace to end by itself, and then it has succeeded."""
    story = Story().running(at=9).tell(*(events.RankCompleted(rank=rank, step=10) for rank in range(2))).tell(a_notice())
    assert story.job.phase is Phase.STOPPING and not story.sent(AskFlush) and not story.sent(AskLeave)
    assert ended(story.emptied(0, 0, 1).settled()) == ("SUCCEEDED", 0)


def test_transition_flushing_to_running_when_every_rank_completes_in_a_flush_to_go_on() -> None:
    """A mere `flush` must not put a bound on what a script does after its loop."""
    story = flushing(Story(), "flush").tell(*(events.RankCompleted(rank=rank, step=8) for rank in range(2)))
    assert story.job.phase is Phase.RUNNING and story.timer is None


def test_transition_flushing_to_flushing_when_ranks_complete_during_the_check() -> None:
    """A rank that has answered is not counted again: the check under way stays the one that matters."""
    story = flushing(Story()).saved(0, 1, step=8).tell(*(events.RankCompleted(rank=rank, step=8) for rank in range(2)))
    assert len(story.sent(CheckCheckpoint)) == 1
    assert story.checked(8).job.phase is Phase.STOPPING and not story.sent(AskLeave)


# --- crashes


def test_transition_running_to_waiting_when_a_rank_crashes() -> None:
    """Collapse, a moment for the launcher, kill, settle, and again from the newest checkpoint after the backoff."""
    story = Story().running(at=5).tell(events.RankLost(rank=1))
    assert story.job.phase is Phase.STOPPING and not story.sent(AskLeave)
    story.fire("stop")
    assert len(story.sent(KillTree)) == 1
    report = FailureReport(exit_code=137, rank=1, error="killed by SIGKILL")
    story.tell(events.RankLost(rank=0), events.LeaderExited(returncode=1), events.TreeEmptied()).settled(report, newest_step=4)
    assert story.job.phase is Phase.WAITING and story.job.due == story.now + 1.0
    assert [(crash.signature, crash.step) for crash in story.job.crashes] == [("137:killed by SIGKILL", 5)]
    assert story.running("step-4", 4).job.attempt == 2


def test_transition_settling_to_waiting_with_growing_pauses() -> None:
    """Crashes without progress wait longer each time; a newer checkpoint makes the pause short again."""
    story, pauses = Story(restart=RestartPolicy(same_failure_limit=99)), []
    for newest, step in ((3, 5), (3, 6), (3, 7), (8, 9)):
        story.running("step-3", 3, at=step).crashed(step=step, newest_step=newest)
        assert story.job.due is not None
        pauses.append(story.job.due - story.now)
    assert pauses == [1.0, 2.0, 4.0, 1.0]


def test_transition_settling_to_ended_when_the_crash_budget_is_spent() -> None:
    """Four crashes are survived when four are allowed; the fifth ends the job with its own code."""
    story = Story(restart=RestartPolicy(max_crashes=4, same_failure_limit=99))
    for step in range(5, 10):
        story.running("step-3", 3, at=step).crashed(code=7, step=step, newest_step=3)
    assert len(story.sent(Spawn)) == 5
    assert ended(story) == ("FAILED", 1), "an exception is code 1, whatever the launcher made of it"


def test_transition_settling_to_waiting_ten_preemptions_cost_no_crash() -> None:
    """Ten preemptions and two crashes are survived with two crashes allowed; the third crash is the last."""
    story = Story(restart=RestartPolicy(max_crashes=2, same_failure_limit=99))
    for step in range(10, 110, 10):
        story.running(f"step-{step - 10}", step - 10, at=step).tell(a_notice()).saved(0, 1, step=step).checked(step)
        story.emptied(1, 0, 1).settled(newest_step=step).answer(
            events.RequeueEnded, accepted=True, relaunch_in_s=0.0, detail="here"
        )
    for step in (101, 102):
        story.running("step-100", 100, at=step).crashed(step=step, newest_step=100)
        assert story.job.phase is Phase.WAITING
    assert (story.job.preemptions, len(story.job.crashes)) == (10, 2)
    assert ended(story.running("step-100", 100, at=103).crashed(step=103, newest_step=100)) == ("FAILED", 1)


def test_transition_settling_to_ended_when_start_up_fails_identically() -> None:
    """A bad import is tried once more, not ten times."""
    story = Story()
    report = FailureReport(exit_code=1, rank=0, error="ImportError: no module named x")
    story.launched().emptied(1).settled(report)
    assert story.job.phase is Phase.WAITING
    assert ended(story.launched().emptied(1).settled(report)) == ("FAILED", 1) and len(story.sent(Spawn)) == 2


def test_transition_settling_to_waiting_when_an_unhooked_job_crashes_twice() -> None:
    """Without hooks no step is heard of: a job that ran for a while has started, and is not given up for equal codes."""
    story = Story()
    for _ in range(3):
        story.launched().fire("attach").emptied(1).settled()
        assert story.job.phase is Phase.WAITING
    assert ended(Story().launched().emptied(1).settled().launched().emptied(1).settled()) == ("FAILED", 1)


def test_transition_settling_to_waiting_behind_a_poisoned_checkpoint() -> None:
    """The same death twice at one step from one checkpoint: it is set aside, once, and an older one is tried."""
    story = Story()
    for _ in range(2):
        story.running("step-30", 30, at=33).crashed(step=33, newest_step=30)
    story.fire("relaunch")
    assert [choose.set_aside for choose in story.sent(ChooseResumePoint)] == [None, None, "step-30"]
    story.answer(events.ResumePointChosen, path="step-20", step=20, reason="newest whole").tell(events.Spawned(pid=1))
    assert story.job.newest_step == 20 and story.job.set_aside is None


def test_transition_running_to_stopping_when_torchrun_terms_the_peers_of_a_crashed_rank() -> None:
    """TERM at the healthy rank first, loss of the other right after: no flush; the healthy rank is told to leave; a crash."""
    story = Story().running(at=5).tell(events.RankTermed(rank=0))
    assert story.job.phase is Phase.RUNNING and story.timer is not None and story.timer.name == "stray"
    story.tell(events.RankLost(rank=1))
    assert story.job.phase is Phase.STOPPING and len(story.sent(AskLeave)) == 1 and not story.sent(AskFlush)
    assert story.emptied(1, 0).settled().job.phase is Phase.WAITING and len(story.job.crashes) == 1


def test_transition_stopping_to_stopping_when_the_term_at_a_peer_comes_after_the_loss() -> None:
    """The other order of the same story; asked to leave once."""
    story = Story().running(at=5).tell(events.RankLost(rank=1))
    assert not story.sent(AskLeave)
    story.tell(events.RankTermed(rank=0), events.RankTermed(rank=0))
    assert len(story.sent(AskLeave)) == 1 and not story.sent(AskFlush)


def test_transition_running_to_flushing_when_a_stray_term_lost_nobody() -> None:
    """TERM at the ranks and all are alive a second later: it was a notice that went past us. Repeated TERMs do not postpone it."""
    story = Story().running(at=5).tell(events.RankTermed(rank=0))
    due = story.job.due
    story.advance(0.9).tell(events.RankTermed(rank=1))
    assert story.job.due == due
    story.fire("stray")
    assert story.job.phase is Phase.FLUSHING and story.sent(AskFlush)[0].purpose == "leave"
    assert left(story).settled(newest_step=8).job.phase is Phase.REQUEUEING


@pytest.mark.parametrize("when", ["while flushing to go on", "before all had attached"])
def test_transition_to_running_looks_into_a_term_that_came_meanwhile(when: str) -> None:
    """A stray TERM outside RUNNING is not forgotten."""
    if when == "while flushing to go on":
        story = flushing(Story(), "flush").tell(events.RankTermed(rank=0)).saved(0, 1, step=8).checked(8)
    else:
        story = Story().launched().tell(events.RankAttached(rank=0, world_size=2), events.RankTermed(rank=0))
        story.tell(events.RankAttached(rank=1, world_size=2))
    assert story.job.phase is Phase.RUNNING
    assert story.fire("stray").job.phase is Phase.FLUSHING


def test_transition_running_to_waiting_when_the_leader_is_killed() -> None:
    """SIGKILL of torchrun leaves ranks alive: they are killed, and nothing is launched before the last of them is gone."""
    story = Story().running(at=5).tell(events.LeaderExited(returncode=-9)).fire("stop")
    assert len(story.sent(KillTree)) == 1
    story.tell(events.RankLost(rank=0), events.RankLost(rank=1))
    assert story.job.phase is Phase.KILLING and len(story.sent(Spawn)) == 1
    story.tell(events.TreeEmptied()).settled(newest_step=4)
    assert story.job.phase is Phase.WAITING and story.job.crashes[0].signature == "-9:"


def test_transition_killing_to_ended_when_a_process_survives_the_kill() -> None:
    """Stuck in the kernel: said loudly with our own code, nothing is launched or handed back."""
    story = flushing(Story()).saved(0, 1, step=8).checked(8).fire("stop").fire("kill")
    assert ended(story) == ("FAILED", 70) and not story.sent(Requeue)


def test_transition_settling_to_ended_gives_the_code_of_a_rank_that_is_the_leader() -> None:
    """A single process with hooks that exits 7: its connection closes first, its code is still known."""
    story = Story(world_size=1, restart=RestartPolicy(max_crashes=0)).running(at=5).emptied(7, 0).settled()
    assert ended(story) == ("FAILED", 7)


# --- no time, no hooks


def test_transition_flushing_to_stopping_when_a_rank_dies_near_the_deadline() -> None:
    """The collapse ends no later than the deadline."""
    story = flushing(Story(), grace_s=2.0).tell(events.RankLost(rank=0))
    assert story.job.due is not None and story.job.due <= 102.0


def test_transition_running_to_stopping_when_nothing_is_attached() -> None:
    """An unhooked job gets the SIGTERM and nearly all of the grace, then it is requeued."""
    story = Story().launched().fire("attach").tell(a_notice(grace_s=30.0))
    assert len(story.sent(TermTree)) == 1 and story.job.due == story.now + 29.0
    assert story.emptied(-15).settled().job.phase is Phase.REQUEUEING


def test_transition_starting_to_stopping_when_only_some_ranks_are_attached() -> None:
    """Attached ranks take a TERM for news, so they are asked to leave as well."""
    story = Story().launched().tell(events.RankAttached(rank=0, world_size=2)).tell(a_notice())
    assert len(story.sent(TermTree)) == 1 and len(story.sent(AskLeave)) == 1


def test_transition_flushing_to_stopping_leaves_before_the_deadline() -> None:
    """With little grace the kill comes before the deadline, not on it."""
    story = flushing(Story(), grace_s=3.0).fire("flush")
    assert story.job.notice is not None and story.job.due is not None and story.job.due < story.job.notice.deadline


# --- checkpoints


def test_checks_prune_only_while_a_tree_lives_and_never_for_an_older_checkpoint() -> None:
    """A late answer is remembered, but prunes nothing beside whoever settles; an answer out of order prunes nothing either."""
    story = Story().running(at=20)
    story.tell(events.CheckpointChecked(ticket=0, path="step-20", step=20, whole=True, reason=""))
    story.tell(events.CheckpointChecked(ticket=0, path="step-10", step=10, whole=True, reason=""))
    assert story.sent(Prune) == [Prune(newest="step-20")] and story.job.newest_step == 20
    story.emptied(1, 0, 1).tell(events.CheckpointChecked(ticket=0, path="step-30", step=30, whole=True, reason=""))
    assert len(story.sent(Prune)) == 1 and story.job.newest_step == 30


def test_a_periodic_save_is_checked_when_the_last_receipt_is_in() -> None:
    """Not before, and without a change of phase."""
    story = Story().running(at=10)
    save = [events.RankSaved(rank=rank, flush_id=0, step=10, path="step-10", seconds=1.0) for rank in range(2)]
    assert not story.tell(save[0]).sent(CheckCheckpoint)
    assert story.tell(save[1]).sent(CheckCheckpoint) == [CheckCheckpoint(ticket=0, path="step-10", step=10)]
    assert story.job.phase is Phase.RUNNING and story.job.saves == ()


def test_a_usage_error_after_a_resume_hints_at_the_resume_option() -> None:
    """C73: argparse exits 2 on an unknown --resume: the user reads which option of ours takes it away."""
    job = msgspec.structs.replace(
        Job(limits=Limits()), phase=Phase.SETTLING, attempt=2, resume="/c/step-5", leader_code=2, ticket=1
    )
    after, _, reason = machine.step(job, events.Settled(ticket=1, reports=(), newest_step=5, jitter=0.0), 0.0, 0.0)
    assert after.phase is Phase.WAITING
    assert "--resume-argument none" in reason
