"""Everything a session is told when it is built. `attaching` fills it from arguments and environment."""

import signal
from typing import Any

import msgspec

from supervise_hooks.channel import Channel
from supervise_hooks.orders import OnDeath
from supervise_hooks.resuming import Start
from supervise_hooks.saving import Place
from supervise_hooks.store import Store


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a session is told when it is built."""

    run_id: str
    attempt: int
    rank: int
    world_size: int
    place: Place
    start: Start = Start()
    store: Store
    channel: Channel
    origin: str = ""
    every: int | None = None
    """Steps between periodic saves."""
    every_s: float | None = None
    metric: tuple[str, str] | None = None
    """Name of a logged value and `min` or `max`."""
    config: dict[str, Any] | None = None
    save_at_end: bool = True
    on_death: OnDeath = "flush"
    signals: tuple[int, ...] = (signal.SIGTERM,)
