"""Performs the machine's commands on the real world. Knows plugins only through `ports`; decides nothing."""

import getpass
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from supervise_daemon.core import commands, events
from supervise_daemon.job_spec import JobSpec
from supervise_daemon.ports import LaunchContext, Launcher, Requeue
from supervise_daemon.runtime.output import Output
from supervise_daemon.runtime.rank_server import RankServer
from supervise_daemon.runtime.run_dir import RunDir
from supervise_daemon.runtime.tree import Tree
from supervise_daemon.runtime.workers import Workers
from supervise_hooks.contract import env, messages


class Checkpoints(Protocol):
    """The checkpoint side of the world, run in worker threads."""

    def choose(self, set_aside: str | None) -> events.ResumePointChosen | events.ResumeRefused:
        """Clear away an earlier tree, move `set_aside` away, verify fully, choose. The ticket is filled in by the caller."""

    def check(self, path: str, step: int) -> events.CheckpointChecked:
        """Seal and verify quickly."""

    def prune(self, newest: str) -> None:
        """Apply retention."""

    def newest_step(self) -> int | None:
        """Seal what lies ready after an attempt; step of the newest whole checkpoint of this run."""


class World(msgspec.Struct, kw_only=True):
    """What the executor acts on; put together by `assembly`."""

    spec: JobSpec
    run_dir: RunDir
    private_dir: Path
    tree: Tree
    server: RankServer
    workers: Workers
    launcher: Launcher
    requeue: Requeue
    checkpoints: Checkpoints
    say: Callable[[str], None]
    """One line to the user."""


class Executor:
    """One method a command; answers are posted as events."""

    def __init__(self, world: World, post: Callable[[events.Event], None]) -> None:
        self.world = world
        self.post = post
        self.timer: tuple[float, str, int] | None = None
        """(monotonic time, name, serial) of the one armed timer."""
        self.output: Output | None = None
        self.marker = ""
        self.exit: tuple[int, str] | None = None
        self._noted = False
        self.before_spawn: Callable[[int, str], None] = lambda attempt, marker: None
        """Makes the coming attempt known durably before it exists."""
        self._handlers: Mapping[type[commands.Command], Callable[..., None]] = {
            commands.ArmTimer: self._arm,
            commands.DisarmTimer: self._disarm,
            commands.ChooseResumePoint: self._choose,
            commands.Spawn: self._spawn,
            commands.AskFlush: self._ask_flush,
            commands.AskLeave: self._ask_leave,
            commands.CheckCheckpoint: self._check,
            commands.Prune: self._prune,
            commands.TermTree: self._term,
            commands.KillTree: self._kill,
            commands.Settle: self._settle,
            commands.Requeue: self._requeue,
            commands.Tell: self._tell,
            commands.Finish: self._finish,
        }

    def perform(self, command: commands.Command) -> None:
        """Do it."""
        self._handlers[type(command)](command)

    def _arm(self, command: commands.ArmTimer) -> None:
        self.timer = (command.at, command.name, command.serial)

    def _disarm(self, command: commands.DisarmTimer) -> None:
        self.timer = None

    def _choose(self, command: commands.ChooseResumePoint) -> None:
        checkpoints = self.world.checkpoints
        self.world.workers.submit(lambda: msgspec.structs.replace(checkpoints.choose(command.set_aside), ticket=command.ticket))

    def _spawn(self, command: commands.Spawn) -> None:
        world, spec = self.world, self.world.spec
        self.marker = os.urandom(16).hex()
        try:
            attempt_dir = world.run_dir.attempt_dir(command.attempt)
            self.before_spawn(command.attempt, self.marker)
            plan = world.launcher.plan(
                spec.argv,
                LaunchContext(
                    attempt=command.attempt,
                    resume=command.resume,
                    resume_argument=spec.resume_argument,
                    attempt_dir=attempt_dir,
                    grace_s=spec.grace_s,
                ),
            )
            if not self._noted:
                self._noted = True
                for note in plan.notes:
                    world.say(note)
            world.server.run_id, world.server.attempt = spec.run_id, command.attempt
            self.output = Output(attempt_dir / "output.log")
            world.tree.servants.add(self.output.start())
            try:
                pid = world.tree.spawn(plan.argv, self._environ(command, plan.env), self.output.stdout, self.output.stderr)
            finally:
                self.output.close_write_ends()
        except OSError as error:
            missing = error.errno in (2, 13)
            what = error.filename or spec.argv[0]
            self.post(events.SpawnFailed(error=f"cannot start {what!r}: {error.strerror}", exit_code=127 if missing else 71))
            return
        self.post(events.Spawned(pid=pid))

    def _environ(self, command: commands.Spawn, added: Mapping[str, str]) -> dict[str, str]:
        world, spec = self.world, self.world.spec
        temporary = world.private_dir / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        ours = {
            env.SOCKET: str(world.server.path),
            env.RUN_ID: spec.run_id,
            env.ATTEMPT: str(command.attempt),
            env.RESUME: command.resume or "",
            env.RESUME_STEP: "" if command.resume_step is None else str(command.resume_step),
            env.RUN_DIR: str(world.run_dir.path.absolute()),
            env.MARKER: self.marker,
            env.ON_SUPERVISOR_DEATH: spec.on_supervisor_death,
            # Killed ranks leave pymp-* and torchelastic_* folders behind: in here they go away with us.
            "TMPDIR": str(temporary),
            # The compile cache must outlive the attempt: keep it where it would be without us.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductor_cache(),
            # A pipe makes Python hold back output until a buffer is full: lines would be lost with a killed rank.
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
        }
        if spec.checkpoints is not None:
            ours[env.CHECKPOINTS] = str(spec.checkpoints)
        return {**os.environ, **ours, **added}

    def _ask_flush(self, command: commands.AskFlush) -> None:
        left_s = max(command.deadline - time.monotonic(), 0.0)
        self.world.server.broadcast(
            messages.FlushRequest(flush_id=command.flush_id, purpose=command.purpose, left_s=left_s, reason=command.reason)
        )

    def _ask_leave(self, command: commands.AskLeave) -> None:
        self.world.server.broadcast(messages.Leave(reason=command.reason))

    def _check(self, command: commands.CheckCheckpoint) -> None:
        checkpoints = self.world.checkpoints
        self.world.workers.submit(
            lambda: msgspec.structs.replace(checkpoints.check(command.path, command.step), ticket=command.ticket)
        )

    def _prune(self, command: commands.Prune) -> None:
        self.world.workers.submit(lambda: self.world.checkpoints.prune(command.newest))

    def _term(self, command: commands.TermTree) -> None:
        # A launcher passes TERM on to its ranks (torchrun 2.13 does, and TERMs them twice if they get one from us as well).
        leader = self.world.tree.leader
        if leader is not None:
            try:
                os.kill(leader, signal.SIGTERM)
            except ProcessLookupError:
                self.world.tree.signal_members(signal.SIGTERM)

    def _kill(self, command: commands.KillTree) -> None:
        self.world.tree.kill()

    def _settle(self, command: commands.Settle) -> None:
        self.world.server.drop_ranks()
        output, launcher, checkpoints = self.output, self.world.launcher, self.world.checkpoints

        def settle() -> events.Settled:
            if output is not None:
                output.drained.wait(5.0)
            return events.Settled(
                ticket=command.ticket,
                reports=launcher.read_failures(output.tail() if output is not None else "", command.leader_code),
                newest_step=checkpoints.newest_step(),
                jitter=random.random(),  # noqa: S311 - spreads relaunches, guards nothing
            )

        self.world.workers.submit(settle)

    def _requeue(self, command: commands.Requeue) -> None:
        def requeue() -> events.RequeueEnded:
            done = self.world.requeue.requeue(command.reason, command.left_s)
            return events.RequeueEnded(
                ticket=command.ticket, accepted=done.accepted, relaunch_in_s=done.relaunch_in_s, detail=done.detail
            )

        self.world.workers.submit(requeue)

    def _tell(self, command: commands.Tell) -> None:
        self.world.say(command.text)

    def _finish(self, command: commands.Finish) -> None:
        self.exit = (command.exit_code, command.reason)
        self.world.say(command.reason)


def _inductor_cache() -> str:
    """Where torch would put its compile cache (torch 2.13: by user name, in the temporary folder)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in many containers
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))
