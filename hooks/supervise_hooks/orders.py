"""What a rank does when it hears something: an order of its supervisor, a signal, the supervisor's death, the clock.

Runs in the listener thread; the saving itself is done by the training loop, through `rounds`.
"""

import signal
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from supervise_hooks.agreement import Purpose
from supervise_hooks.channel import Channel
from supervise_hooks.contract import exit_codes
from supervise_hooks.contract.messages import FlushRequest, Leave, StrayTerm, ToRank
from supervise_hooks.leaving import leave
from supervise_hooks.progress import INTERVAL_S, Pace, Sight
from supervise_hooks.rounds import Rounds
from supervise_hooks.summary import Teller

ALONE_GRACE_S = 25.0
"""Time for a save nobody gave a deadline for: torchrun and Slurm kill 30 s after their SIGTERM by default."""
LEAVE_MARGIN_S = 10.0
"""How long past a flush's deadline a rank waits to be told to leave before it leaves by itself."""

OnDeath = Literal["flush", "continue"]
Standing = Literal["supervised", "orphaned", "alone"]


class Timing(msgspec.Struct, frozen=True):
    """Saves by the clock."""

    every_s: float | None = None
    leads: bool = False
    """This rank starts them for all."""


class Orders:
    """Hears, and asks for rounds. `standing` says who may tell us to leave."""

    def __init__(self, channel: Channel, on_death: OnDeath, timing: Timing, teller: Teller) -> None:
        self._channel = channel
        self._on_death = on_death
        self._timing = timing
        self._teller = teller
        self._pace = Pace()
        self._next_report = 0.0
        self._warned = False
        self._rounds: Rounds | None = None
        self._look: Callable[[], Sight] = lambda: Sight(0, None, "setup", {})
        self.standing: Standing = "supervised" if channel.connected else "alone"
        self.orphaned = threading.Event()
        self.saved_at = time.monotonic()
        """When the last save ended; the loop sets it."""

    def attach(self, rounds: Rounds, look: Callable[[], Sight]) -> None:
        """Tell who is to be asked, before the channel starts."""
        self._rounds = rounds
        self._look = look

    def hear_message(self, message: ToRank) -> None:
        """An order of the supervisor."""
        match message:
            case FlushRequest():
                self._ask(message.purpose, message.reason, message.left_s, message.flush_id)
            case Leave():
                self._teller.news(f"leaving: {message.reason}")
                self._channel.drain(1.0)
                leave(exit_codes.FINISHED)
            case _:
                pass  # a reply to a verb is nothing for a rank

    def hear_signal(self, number: int) -> None:
        """News for a supervisor; alone it is the order itself. Repeats change nothing."""
        if self.standing == "supervised":
            self._channel.send(StrayTerm(signal=number))
        elif not self._warned:
            self._warned = True
            name = signal.Signals(number).name
            self._teller.news(f"{name}: saving at the next common step, then leaving")
            self._ask("leave", name, ALONE_GRACE_S)

    def hear_gone(self, why: str) -> None:
        """The supervisor died."""
        if self._on_death == "continue":
            self.standing = "alone"
            self._teller.trouble(f"the supervisor is gone ({why}): training goes on alone")
        else:
            self.standing = "orphaned"
            self._teller.trouble(f"the supervisor is gone ({why}): saving at the next common step, then leaving")
            self._ask("leave", "the supervisor is gone", ALONE_GRACE_S)
        self.orphaned.set()

    def tick(self, now: float) -> float | None:
        """Report progress, begin saves by the clock; returns when to be called again."""
        due: list[float] = []
        if self._channel.connected:
            if now >= self._next_report:
                report = self._pace.report(self._look(), now)
                if report is not None:
                    self._channel.send(report)
                self._next_report = now + INTERVAL_S
            due.append(self._next_report)
        if self._timing.leads and self._timing.every_s is not None:
            if now >= self.saved_at + self._timing.every_s:
                self.saved_at = now  # moved on again when the save is done
                self._ask("periodic", f"{self._timing.every_s:g} s have passed", max(60.0, self._timing.every_s))
            due.append(self.saved_at + self._timing.every_s)
        return min(due, default=None)

    def _ask(self, purpose: Purpose, reason: str, left_s: float, flush_id: int = 0) -> None:
        assert self._rounds is not None
        self._rounds.ask(purpose, reason, left_s, flush_id)
