"""`attach`: from the script's objects and the environment to a session. The only place of the library that reads the environment.

What the session then does is in `session`. Frameworks are loaded here, by name, when first needed.
"""

import atexit
import importlib
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from supervise_hooks import __version__, resuming
from supervise_hooks.channel import Channel
from supervise_hooks.contract import env, layout, messages
from supervise_hooks.contract.errors import ContractError, SuperviseError
from supervise_hooks.contract.manifest import read_manifest, read_receipt
from supervise_hooks.contract.retention import Retention
from supervise_hooks.saving import Place
from supervise_hooks.session import Session
from supervise_hooks.setup import Setup
from supervise_hooks.state import TrainingState
from supervise_hooks.store import LocalStore, Store, TcpStore, share
from supervise_hooks.summary import Teller
from supervise_hooks.world import World, find_world

_BEGIN_S = 300.0
"""How long ranks wait for rank 0 to say where to start: it may be verifying a large checkpoint."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `attach` that are not training objects."""

    checkpoints: str | os.PathLike[str] | None = None
    every: int | None = None
    every_s: float | None = None
    keep: int = 3
    keep_every: int | None = None
    metric: str | None = None
    resume: str | os.PathLike[str] | None = None
    config: Any = None
    save_at_end: bool = True


def attach(
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    *,
    scaler: Any = None,
    objects: Mapping[str, Any] | None = None,
    rng: bool = True,
    checkpoints: str | os.PathLike[str] | None = None,
    every: int | None = None,
    every_s: float | None = None,
    keep: int = 3,
    keep_every: int | None = None,
    metric: str | None = None,
    resume: str | os.PathLike[str] | None = None,
    config: Any = None,
    save_at_end: bool = True,
) -> Session:
    """A session over these objects, already resumed if told to by `resume` or the supervisor.

    objects: anything else with `state_dict` and `load_state_dict`, by name. checkpoints: folder, default
    $SUPERVISE_CHECKPOINTS or "checkpoints". every, every_s: steps, seconds between periodic saves. keep, keep_every: how many
    of the newest stay, and which multiples. metric: a logged value that chooses `best`: "loss", "min:loss", "max:accuracy".
    resume: a checkpoint, or "auto" for the newest whole one; default: what the supervisor says, alone a fresh start.
    config: a mapping or namespace, stored and compared on resume. Raises SuperviseError or TypeError, here and never later.
    """
    wishes = Wishes(
        checkpoints=checkpoints,
        every=every,
        every_s=every_s,
        keep=keep,
        keep_every=keep_every,
        metric=metric,
        resume=resume,
        config=config,
        save_at_end=save_at_end,
    )
    _check(wishes)
    data: Any = None
    if loader is not None:
        data = importlib.import_module("supervise_hooks.integrations.data").wrap(loader)
    framework = importlib.import_module("supervise_hooks.integrations.torch")
    state: TrainingState = framework.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, loader=data, objects=dict(objects or {}), rng=rng
    )
    session = open_session(state, wishes, os.environ, data)
    _hook_exit(session)
    return session


def open_session(state: TrainingState, wishes: Wishes, environ: Mapping[str, str], loader: Any = None) -> Session:
    """A session over any `TrainingState`, e.g. one of `testing`. No exit hooks. Raises SuperviseError, TypeError."""
    _check(wishes)
    config = _plain_config(wishes.config)
    world = find_world(environ)
    folder = Path(wishes.checkpoints or environ.get(env.CHECKPOINTS) or "checkpoints").resolve()
    teller = Teller(world.rank, world.world_size)
    channel = Channel(environ.get(env.SOCKET))
    try:
        store = _open_store(world, environ)
        began = _begin(world, store, folder, wishes, environ)
        if channel.connected:
            channel.send(_hello(world, began, folder, wishes))
            channel.send(messages.Progress(step=0, activity="loading"))
            _check_folder_was_known(folder, began)
        start = resuming.load(state, began.path)
        resuming.tell(start, config, state.rates(), teller)
        channel.send(messages.Resumed(path=began.path, step=start.step, seconds=start.seconds))
    except BaseException:
        channel.close()
        raise
    setup = Setup(
        run_id=began.run_id,
        attempt=began.attempt,
        rank=world.rank,
        world_size=world.world_size,
        place=_place(folder, wishes, start),
        start=start,
        store=store,
        channel=channel,
        origin=f"{os.uname().nodename}:{environ[env.SOCKET]}" if channel.connected else "",
        every=wishes.every,
        every_s=wishes.every_s,
        metric=_parse_metric(wishes.metric),
        config=config,
        save_at_end=wishes.save_at_end,
        on_death="continue" if environ.get(env.ON_SUPERVISOR_DEATH) == "continue" else "flush",
        signals=_signals(environ),
    )
    return Session(state, setup, loader)


def _place(folder: Path, wishes: Wishes, start: resuming.Start) -> Place:
    return Place(
        folder=folder,
        retention=Retention(keep_last=wishes.keep, keep_every=wishes.keep_every),
        in_use=frozenset([str(start.path)] if start.path else []),
    )


def _signals(environ: Mapping[str, str]) -> tuple[int, ...]:
    """SIGUSR1 is Slurm's early warning (`--signal`); supervised, the daemon is the one to hear it."""
    warned_by_slurm = "SLURM_JOB_ID" in environ and not environ.get(env.SOCKET)
    return (signal.SIGTERM, signal.SIGUSR1) if warned_by_slurm else (signal.SIGTERM,)


# --- where to begin


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks must know alike: decided once, by rank 0 or the supervisor."""

    run_id: str
    attempt: int
    path: str
    """Checkpoint to start from; empty for a fresh start."""


def _begin(world: World, store: Store, folder: Path, wishes: Wishes, environ: Mapping[str, str]) -> Beginning:
    wanted = resuming.wanted(wishes.resume, environ)
    if env.RUN_ID in environ and wanted != resuming.AUTO:
        return Beginning(run_id=environ[env.RUN_ID], attempt=int(environ.get(env.ATTEMPT, "1")), path=wanted)
    mine: str | None = None
    if world.rank == 0:
        path = wanted
        if wanted == resuming.AUTO:
            path, passed = resuming.choose_newest(folder)
            for reason in passed:
                Teller(world.rank, world.world_size).trouble(f"passed over {reason}")
        mine = msgspec.json.encode(_alone(folder, path, environ)).decode()
    return msgspec.json.decode(share(store, "begin", mine, _BEGIN_S), type=Beginning)


def _check_folder_was_known(folder: Path, began: Beginning) -> None:
    """Raise SuperviseError when the supervisor starts us fresh beside checkpoints of this very run: it did not know the folder.

    That happens when its run directory was lost and the script names the folder itself. The Hello has told it by now, so the
    relaunch that follows this error resumes. What it knew and found unusable it has set aside, so nothing is refused twice.
    """
    if began.path or not folder.is_dir():
        return
    for checkpoint in sorted(folder.iterdir()):
        if layout.parse_step(checkpoint.name) is None:
            continue
        try:
            ours = read_manifest(checkpoint).run_id == began.run_id
        except (FileNotFoundError, ContractError):
            continue  # unfinished or torn: no reason to stop
        if ours:
            raise SuperviseError(
                f"cannot start from scratch in {folder}: it holds checkpoints of this run ({checkpoint.name}), but the supervisor did not "
                "know this folder; it does now and launches again from there. To tell it beforehand: supervise --checkpoints"
            )


def _alone(folder: Path, path: str, environ: Mapping[str, str]) -> Beginning:
    """Without a supervisor a run goes on under the checkpoint's run id, as an attempt later than any in the folder."""
    run_id = environ.get(env.RUN_ID, "")
    if not run_id and path:
        try:
            run_id = read_manifest(Path(path)).run_id
        except (FileNotFoundError, ContractError):
            pass  # loading will say it better
    attempt = int(environ[env.ATTEMPT]) if env.ATTEMPT in environ else 1 + max(_attempts(folder), default=0)
    return Beginning(run_id=run_id or f"alone-{secrets.token_hex(6)}", attempt=attempt, path=path)


def _attempts(folder: Path) -> list[int]:
    """Attempts that left anything here, sealed or not."""
    found: list[int] = []
    for checkpoint in folder.iterdir() if folder.is_dir() else []:
        if layout.parse_step(checkpoint.name) is None or not checkpoint.is_dir():
            continue
        for name in os.listdir(checkpoint):
            parsed = layout.parse_rank_file(name)
            try:
                if name == layout.MANIFEST:
                    found.append(read_manifest(checkpoint).attempt)
                elif parsed is not None and parsed[2] == "receipt.json":
                    found.append(read_receipt(checkpoint, parsed[0], parsed[1]).attempt)
            except (FileNotFoundError, ContractError):
                continue  # torn, or just removed: it says nothing
    return found


def _open_store(world: World, environ: Mapping[str, str]) -> Store:
    if world.world_size == 1:
        return LocalStore()
    prefix = f"supervise/{environ.get(env.RUN_ID, '')}/{environ.get(env.ATTEMPT, '')}/{world.generation}/"
    return TcpStore(world.host, world.port, prefix)


def _hello(world: World, began: Beginning, folder: Path, wishes: Wishes) -> messages.Hello:
    return messages.Hello(
        version=__version__,
        run_id=began.run_id,
        attempt=began.attempt,
        rank=world.rank,
        local_rank=world.local_rank,
        world_size=world.world_size,
        checkpoints=str(folder),
        keep_last=wishes.keep,
        keep_every=wishes.keep_every,
    )


# --- arguments


def _check(wishes: Wishes) -> None:
    for name, value, kind in (
        ("every", wishes.every, int),
        ("every_s", wishes.every_s, int | float),
        ("keep", wishes.keep, int),
        ("keep_every", wishes.keep_every, int),
    ):
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"cannot attach: {name} is {value!r}, not a number")
        if value <= 0:
            raise SuperviseError(f"cannot attach: {name} is {value!r}, but must be more than 0")
    _parse_metric(wishes.metric)


def _parse_metric(metric: str | None) -> tuple[str, str] | None:
    if metric is None:
        return None
    mode, colon, name = metric.partition(":")
    if not colon:
        mode, name = "min", metric
    if mode not in ("min", "max") or not name:
        raise SuperviseError(f"cannot attach: metric is {metric!r}, but must be like 'loss', 'min:loss' or 'max:accuracy'")
    return name, mode


def _plain_config(config: Any) -> dict[str, Any] | None:
    """The user's configuration as JSON would give it back; what JSON cannot hold is kept by its repr."""
    if config is None:
        return None
    if not isinstance(config, Mapping) and hasattr(config, "__dict__"):
        config = vars(config)
    try:
        plain = msgspec.json.decode(msgspec.json.encode(config, enc_hook=repr))
    except (TypeError, ValueError) as error:
        raise TypeError(f"cannot attach: config has no JSON form: {error}") from error
    if not isinstance(plain, dict):
        raise TypeError(f"cannot attach: config is a {type(config).__name__}, not a mapping or a namespace")
    return plain


# --- the end of the script


def _hook_exit(session: Session) -> None:
    """Tell the supervisor how the script ended. Only in this process: a forked child inherits the hooks, not the right."""
    owner = os.getpid()
    before = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == owner and not session.closed:
            session.fail(error)
        before(kind, error, trace)

    def at_exit() -> None:
        if os.getpid() == owner:
            session.close()

    sys.excepthook = on_exception
    atexit.register(at_exit)
