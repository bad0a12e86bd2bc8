"""Composition root: the one module that names concrete classes and puts a supervisor together."""

import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from supervise_daemon.core.job import Job
from supervise_daemon.formats.keeper import Keeper
from supervise_daemon.job_spec import JobSpec
from supervise_daemon.launchers.command import CommandLauncher
from supervise_daemon.launchers.torchrun import TorchrunLauncher
from supervise_daemon.notices.file import FileNotice
from supervise_daemon.ports import Launcher, NoticeSource, Requeue
from supervise_daemon.requeue.exit_code import ExitCodeRequeue
from supervise_daemon.requeue.local import LocalRequeue
from supervise_daemon.runtime.clock import Clock
from supervise_daemon.runtime.control import Controls
from supervise_daemon.runtime.executor import Executor, World
from supervise_daemon.runtime.journal import Journal, Memory
from supervise_daemon.runtime.loop import Loop
from supervise_daemon.runtime.rank_server import Peer, RankServer
from supervise_daemon.runtime.recorder import Recorder
from supervise_daemon.runtime.run_dir import RunDir, make_private_dir, remove_private_dir, sweep_private_dirs
from supervise_daemon.runtime.scribe import Scribe
from supervise_daemon.runtime.signals import SignalInbox
from supervise_daemon.runtime.status import Status, mask_secrets
from supervise_daemon.runtime.takeover import take_over
from supervise_daemon.runtime.tree import Tree, become_subreaper
from supervise_daemon.runtime.workers import Workers
from supervise_hooks.contract import messages
from supervise_hooks.contract.identity import identify


def choose_launcher(spec: JobSpec) -> Launcher:
    """The launcher asked for, or the first that recognises the command."""
    launchers: tuple[Launcher, ...] = (TorchrunLauncher(), CommandLauncher())
    if spec.launcher != "auto":
        return next(launcher for launcher in launchers if launcher.name == spec.launcher)
    return next(launcher for launcher in launchers if launcher.recognises(spec.argv))


def choose_requeue(spec: JobSpec) -> Requeue:
    """The requeue backend asked for."""
    return LocalRequeue(spec.relaunch_delay_s) if spec.requeue == "local" else ExitCodeRequeue()


def notice_sources(spec: JobSpec) -> list[NoticeSource]:
    """Sources that poll."""
    return [] if spec.notice_file is None else [FileNotice(spec.notice_file, spec.grace_s)]


def supervise(spec: JobSpec, inbox: SignalInbox) -> int:
    """Look after the job to its end; the exit code. Raises AlreadyRunning, SuperviseError, OSError."""
    run_dir = RunDir(spec.run_root, spec.name)
    run_dir.acquire()
    private_dir = make_private_dir(run_dir.owner_key())
    try:
        return _build(spec, run_dir, private_dir).run(inbox)
    finally:
        remove_private_dir(private_dir)
        run_dir.release()


def _build(spec: JobSpec, run_dir: RunDir, private_dir: Path) -> Loop:
    become_subreaper()
    clock, say = Clock(), speaker(spec.quiet)
    scribe = Scribe()
    journal = Journal(run_dir.journal, say, scribe)
    memory = journal.recall()
    memory = msgspec.structs.replace(
        memory,
        attempt=max(memory.attempt, run_dir.highest_attempt()),
        ever_whole=memory.ever_whole and not spec.fresh,  # what was whole before a fresh start is not missed after it
    )
    recorder = Recorder(journal, memory, _first_status(spec, memory, private_dir, clock), run_dir.status, scribe, clock)
    recorder.complain = say
    selector = selectors.DefaultSelector()
    tree, workers = Tree(), Workers()
    posts: list[Callable[..., None]] = []
    server = RankServer(private_dir / "supervise.sock", selector, lambda event: posts[0](event))

    def clear() -> str | None:
        why_not = take_over(run_dir.path, spec.wait_for_old_s, say)
        if why_not is None:
            sweep_private_dirs(run_dir.owner_key(), keep=private_dir)
        return why_not

    keeper = Keeper(
        spec=spec,
        folder=lambda: spec.checkpoints or (Path(recorder.memory.checkpoints) if recorder.memory.checkpoints else None),
        facts=lambda: (recorder.memory.attempt == 0, recorder.memory.ever_whole),
        clear=clear,
        say=say,
    )
    controls = Controls(server)

    def tell(text: str) -> None:
        say(text)
        controls.tell(text)

    world = World(
        spec=spec,
        run_dir=run_dir,
        private_dir=private_dir,
        tree=tree,
        server=server,
        workers=workers,
        launcher=choose_launcher(spec),
        requeue=choose_requeue(spec),
        checkpoints=keeper,
        say=tell,
    )
    executor = Executor(world, lambda event: posts[0](event))
    job = Job(
        limits=spec.limits,
        attempt=memory.attempt,
        crashes=memory.crashes,
        preemptions=memory.preemptions,
        set_aside=memory.set_aside,
    )
    loop = Loop(job, executor, recorder, selector, clock)
    loop.sources = notice_sources(spec)
    loop.after_step = controls.follow
    posts.append(loop.post)

    def heard(peer: Peer, message: messages.FromRank) -> None:
        recorder.heard(peer, message)
        keeper.heard(message)
        notice = controls.heard(peer, message, loop.job, spec)
        if notice is not None:
            loop.post(notice)

    def before_spawn(attempt: int, marker: str) -> None:
        recorder.remember(
            attempt=attempt,
            marker=marker,
        )
        recorder.status.output = str(run_dir.attempt_dir(attempt) / "output.log")

    server.on_message = heard
    executor.before_spawn = before_spawn
    recorder.output_tail = lambda: executor.output.tail() if executor.output is not None else ""
    return loop


def _first_status(spec: JobSpec, memory: Memory, private_dir: Path, clock: Clock) -> Status:
    return Status(
        name=spec.name,
        run_id=spec.run_id,
        command=mask_secrets(spec.argv),
        supervisor=identify(),
        started_at=clock.wall(),
        attempt=memory.attempt,
        checkpoints=str(spec.checkpoints) if spec.checkpoints is not None else memory.checkpoints,
        socket=str(private_dir / "supervise.sock"),
        polls={source.name: source.poll_s for source in notice_sources(spec)},
    )


def speaker(quiet: bool) -> Callable[[str], None]:
    """Prints one line to stderr with the time; a closed stderr is no reason to stop."""

    def say(text: str) -> None:
        if quiet:
            return
        try:
            sys.stderr.write(f"supervise {time.strftime('%H:%M:%S')} | {text}\n")
            sys.stderr.flush()
        except OSError:
            return  # the terminal is gone; the journal has it all

    return say
