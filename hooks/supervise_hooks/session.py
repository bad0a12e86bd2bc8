"""The training loop's side: counts steps, stops at boundaries, saves there. Everything the script touches is here.

When to stop is known by `gate` (the hot path is one comparison), why by `rounds` and `orders`, how to save by `saving`.
`attaching` builds a session; nothing here reads the environment.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from supervise_hooks import saving, summary
from supervise_hooks.agreement import Purpose
from supervise_hooks.channel import Handlers
from supervise_hooks.contract import exit_codes, messages
from supervise_hooks.contract.errors import SuperviseError
from supervise_hooks.contract.manifest import Metric, Reason
from supervise_hooks.gate import NEVER, Gate
from supervise_hooks.leaving import leave
from supervise_hooks.orders import LEAVE_MARGIN_S, Orders, Timing
from supervise_hooks.progress import Sight
from supervise_hooks.recording import Moment, Recorder
from supervise_hooks.rounds import Answer, Callbacks, Member, Round, Rounds
from supervise_hooks.setup import Setup
from supervise_hooks.signals import SignalTap
from supervise_hooks.state import TrainingState

_REASONS: dict[Purpose, Reason] = {"leave": "emergency", "continue": "requested", "periodic": "periodic"}


class Session:
    """One attached training process. Use it from the thread that trains."""

    def __init__(self, state: TrainingState, setup: Setup, loader: Any = None) -> None:
        self._state = state
        self._setup = setup
        self._loader = loader
        self._teller = summary.Teller(setup.rank, setup.world_size)
        loaded = setup.start.loaded
        self.step: int = setup.start.step
        """Completed steps."""
        self.resumed: bool = loaded is not None
        """Whether training continues from a checkpoint."""
        self._recorder = Recorder(state, setup, self._teller)
        self._values: dict[str, Any] = self._recorder.restored_values()
        self._interrupted = self._recorder.evaluation_interrupted()
        self._base = self.step
        self._epoch: int | None = None if loaded is None else loaded.epoch
        self._in_epochs = False
        self._open_step = -1
        self._idle = self.step
        """The boundary at which the watcher answers in our stead: set-up or after the end. -1: the loop answers."""
        self._finished = self._failed = self._closed = False
        self._tried = -1
        self._requested: Reason | None = None
        self._activity: messages.Activity = "setup"
        self._evaluation_rng: Any = None
        self._evaluating = False
        self._gate = Gate(self.step)
        self._channel = setup.channel
        self._orders = Orders(self._channel, setup.on_death, Timing(setup.every_s, setup.rank == 0), self._teller)
        member = Member(setup.rank, setup.world_size, setup.origin)
        callbacks = Callbacks(self._channel.send, self._committed, self._abandoned)
        self._rounds = Rounds(member, self._gate, setup.store, callbacks)
        self._orders.attach(self._rounds, self._sight)
        self._tap = self._tap_signals()
        self._rounds.start()
        self._channel.start(Handlers(self._orders.hear_message, self._hear_byte, self._orders.hear_gone, self._orders.tick))

    # --- what the script reads

    @property
    def best(self) -> Metric | None:
        """Best value so far of the metric given to `attach`, as of the last save."""
        return self._recorder.best

    @property
    def epoch(self) -> int | None:
        """The epoch in progress, from 0; None when neither a loader nor `epochs()` counts them."""
        if self._in_epochs or self._loader is None:
            return self._epoch
        return int(self._loader.epoch)

    @property
    def loader(self) -> Any:
        """The loader with its saved position. Iterate it inside `epochs()` or `steps()`, or use `batches()`."""
        return self._loader

    @property
    def evaluation_interrupted(self) -> bool:
        """Whether the checkpoint was saved inside an evaluation that never ended. True until it, or the first step, is done.

        Redo the evaluation before `steps()`. `epochs()` runs the interrupted epoch's remainder again by itself, without
        batches; what it does between its last `advance()` and `evaluating()` should then depend on this.
        """
        return self._interrupted and self.step == self._base

    # --- the loop

    def steps(self, total: int) -> Iterator[int]:
        """Index of each step still to do, up to `total`. Saves happen between steps; at the end a final one."""
        self._begin()
        gate = self._gate
        index = self.step
        while index < total:
            self._open_step = index
            yield index
            if self.step == index:  # else evaluating() or advance() has counted it
                self.step = index + 1
            index = self.step
            gate.next_check = index + 1  # before the gate is read: see Gate
            if gate.at <= index:
                self._stop()
        self._open_step = -1
        self.finish()

    def epochs(self, count: int) -> Iterator[int]:
        """Number of each epoch still to do. Inside, iterate `batches()` and call `advance()` after each optimizer step."""
        if self._epoch is None:
            self._epoch = 0
        self._in_epochs = True
        self._begin()
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1
            self._interrupted = False
        self.finish()
        self._in_epochs = False

    def batches(self) -> Iterator[Any]:
        """Inside `epochs()`: the batches of this epoch still to do. Elsewhere: batches without end."""
        if self._loader is None:
            raise SuperviseError("cannot give batches: no loader was given to attach()")
        if not self._in_epochs:
            yield from self._loader.batches()
        elif self._loader.epoch <= (self._epoch or 0):  # else saved after this epoch's last batch
            yield from self._loader

    def shield(self, loader: Any) -> Any:
        """Give back `loader`, of an evaluation say, with data workers that do not die of a SIGTERM sent to the whole tree."""
        import_module("supervise_hooks.integrations.data_workers").shield(loader)
        return loader

    def advance(self) -> None:
        """One optimizer step is done: this is a boundary. Not needed with `steps()`."""
        if self._idle >= 0:
            self._begin()
        self.step = index = self.step + 1
        self._gate.next_check = index + 1  # before the gate is read: see Gate
        if self._gate.at <= index:
            self._stop()

    def log(self, **values: Any) -> None:
        """Numbers for status, summary lines, the metric and the checkpoint's record. Tensors are read only when needed."""
        for name, value in values.items():
            # A tensor with a graph behind it would keep the graph alive.
            self._values[name] = value.detach() if hasattr(value, "detach") else value

    def save(self, reason: Reason = "requested") -> None:
        """Save at the next boundary; at once when at one. With several ranks, all must call it at the same step."""
        self._requested = reason
        if self._idle >= 0 or self._evaluating:
            self._stop()
        else:
            counted = self._open_step not in (-1, self.step)  # evaluating() has counted the step in progress
            self._gate.schedule(self.step if counted else self.step + 1)

    def service_point(self) -> None:
        """A place inside an evaluation, or in set-up, where a flush may happen. Anywhere else it does nothing."""
        if (self._evaluating or self._idle >= 0) and self._gate.at <= self.step:
            self._stop()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """An evaluation: the training part of this step is done, and what is drawn inside does not change the training."""
        if self._open_step == self.step:
            self.step += 1
        setup = self._idle >= 0
        if not setup:
            self._check()
        activity, self._activity = self._activity, "evaluating"
        self._evaluation_rng = rng = self._state.capture_rng()
        self._evaluating = True
        self._gate.next_check = self.step  # parked: a promise may again be made for this boundary
        try:
            yield
        finally:
            self._evaluating = False
            self._evaluation_rng = None
            self._state.apply_rng(rng)
            self._activity = activity
        self._interrupted = False
        if not setup:
            self._check()

    def finish(self) -> None:
        """The training is done: a final save, unless switched off. Call it before leaving the loop early for good."""
        if self._finished:
            return
        if self._open_step == self.step:
            self.step += 1  # called inside steps(): the step in progress is done
        if self._setup.save_at_end and not self._is_start():
            self._send(self._write("final"))
        self._activity = "finished"
        self._finished = True
        self._idle = self.step
        self._gate.next_check = self.step
        if self._gate.at <= self.step:
            self._stop()
        # A round that aims beyond the end is answered here or by the watcher, whoever sees the other's mark.
        beyond = self._rounds.unreached(self.step)
        if beyond is not None:
            self._rounds.finish(beyond, self._standing_answer())

    def close(self) -> None:
        """Detach: stop listening and put signal handlers back. At exit this happens by itself."""
        if self._closed:
            return
        self._closed = True
        if self._finished and not self._failed:
            self._channel.send(messages.RunCompleted(step=self.step))
        self._channel.drain(2.0)
        if self._tap is not None:
            self._tap.close()
        self._channel.close()
        self._setup.store.close()

    @property
    def closed(self) -> bool:
        """Whether the session is detached."""
        return self._closed

    def fail(self, error: BaseException) -> None:
        """An exception is ending the script: tell the supervisor."""
        self._failed = True
        text = "".join(traceback.format_exception(error))[-(64 << 10) :]
        summary_line = traceback.format_exception_only(error)[-1].strip()[:2000]
        self._channel.send(messages.Failed(step=self.step, error=summary_line, traceback=text))
        self._channel.drain(1.0)

    # --- boundaries

    def _begin(self) -> None:
        """Leave set-up: from here on the loop answers for itself."""
        self._finished = False
        self._activity = "training"
        self._state.restore_rng()
        self._idle = -1
        self._check()
        self._gate.schedule(self._next_scheduled())

    def _check(self) -> None:
        self._gate.next_check = self.step + 1
        if self._gate.at <= self.step:
            self._stop()

    def _stop(self) -> None:
        """The slow path: something is due, or may be, at this boundary."""
        boundary = self.step
        activity, self._activity = self._activity, "waiting"
        active = self._rounds.due(boundary)
        if active is not None:
            self._flush(active)
        elif self._requested is not None:
            self._send(self._write(self._requested))
        elif self._is_periodic(boundary):
            self._send(self._write("periodic"))
        self._activity = activity
        self._gate.schedule(self._next_scheduled())

    def _is_periodic(self, boundary: int) -> bool:
        every = self._setup.every
        return every is not None and boundary % every == 0 and boundary > self._base and boundary != self._tried

    def _next_scheduled(self) -> int:
        every = self._setup.every
        return NEVER if every is None else (self.step // every + 1) * every

    def _flush(self, active: Round) -> None:
        purpose = active.request.purpose
        if self._is_start() and self._recorder.saved is None:
            answer: Answer = messages.NothingToSave(flush_id=0, step=self.step)
        else:
            answer = self._write(_REASONS[purpose])
        self._rounds.finish(active, answer)
        if purpose == "leave" and not self._finished:
            self._await_leave(active, answer)

    def _await_leave(self, active: Round, answer: Answer) -> NoReturn:
        """Saved: now wait to be told to leave, or leave by ourselves when nobody can tell us."""
        self._activity = "waiting"
        left = self._rounds.left_s(active)
        if self._orders.standing == "supervised" and not self._orders.orphaned.wait(max(0.0, left) + LEAVE_MARGIN_S):
            self._teller.trouble("not told to leave in time after the flush: leaving")
            leave(exit_codes.PREEMPTED)
        if isinstance(answer, messages.Saved):
            saving.wait_sealed(Path(answer.path), lambda: self._rounds.left_s(active))
        leave(exit_codes.PREEMPTED if self._orders.standing == "alone" else exit_codes.FINISHED)

    # --- called by the watcher thread

    def _committed(self, active: Round) -> None:
        """Answer for a loop that cannot: it has not begun, or has ended, at the common step."""
        target = active.target
        idle = self._idle
        if target is None or idle < 0 or (target != idle and not self._finished):
            return
        self._rounds.finish(active, self._standing_answer())
        if active.request.purpose == "leave" and self._orders.standing != "supervised" and not self._finished:
            leave(exit_codes.PREEMPTED)

    def _abandoned(self, purpose: Purpose, why: str) -> None:
        if self._closed:
            return
        self._teller.trouble(f"no checkpoint at a common step: {why}")
        if purpose == "leave" and self._orders.standing != "supervised" and not self._finished:
            leave(exit_codes.PREEMPTED)

    def _standing_answer(self) -> Answer:
        """What is true of an idle loop's state without saving anything."""
        if self._recorder.saved is not None and self._recorder.saved.step == self.step:
            return self._recorder.saved
        if self._is_start():
            return messages.NothingToSave(flush_id=0, step=self.step)
        return messages.SaveFailed(flush_id=0, step=self.step, error="the training loop has ended without a final save")

    def _sight(self) -> Sight:
        # A tensor on a device is read by the training thread only, when it saves: reading it waits for the device.
        values = self._values.copy().items()
        near = {name: value for name, value in values if isinstance(value, int | float) or getattr(value, "is_cpu", False)}
        return Sight(self.step, self.epoch, self._activity, summary.finite(near))

    def _hear_byte(self, byte: int) -> None:
        number = None if self._tap is None else self._tap.heard(byte)
        if number is not None:
            self._orders.hear_signal(number)

    # --- saving

    def _is_start(self) -> bool:
        """Whether the state is the one training began with."""
        return self.step == self._base and self._requested is None

    def _send(self, answer: Answer) -> None:
        self._channel.send(answer)

    def _write(self, reason: Reason) -> messages.Saved | messages.SaveFailed:
        """Save at this boundary unless it is saved already. A failure is told; training goes on."""
        self._requested = None
        self._tried = self.step
        activity, self._activity = self._activity, "saving"
        moment = Moment(
            step=self.step,
            epoch=self.epoch,
            reason=reason,
            values=self._values,
            evaluating=self._evaluating,
            rng=self._evaluation_rng,
        )
        answer = self._recorder.write(moment, self._orders.standing == "alone")
        self._orders.saved_at = time.monotonic()
        self._activity = activity
        return answer

    # --- signals

    def _tap_signals(self) -> SignalTap | None:
        if not self._setup.signals:
            return None
        try:
            return SignalTap(self._setup.signals, self._channel.write_fd)
        except ValueError:
            self._teller.trouble("attached outside the main thread: SIGTERM is not heard, only the supervisor's orders are")
            return None
