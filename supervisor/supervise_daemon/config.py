"""Flags, environment and YAML -> JobSpec. The only home of defaults. Precedence: flag > SUPERVISE_* > file > default.

Unknown keys are errors that name the nearest known one; a bad value is one clear error with the value.
"""

import difflib
import hashlib
import os
import re
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from supervise_daemon.core.events import Action
from supervise_daemon.core.job import Limits
from supervise_daemon.core.restart import RestartPolicy
from supervise_daemon.job_spec import JobSpec, SignalRule
from supervise_daemon.launchers.resume_argument import PRESETS
from supervise_hooks.contract.errors import SuperviseError
from supervise_hooks.contract.retention import Retention

FILES = (Path("supervise.yaml"), Path("~/.config/supervise/supervise.yaml"), Path("/etc/supervise/supervise.yaml"))
Duration = float | str
DEFAULT_SIGNALS = {"TERM": "preempt", "USR1": "preempt", "USR2": "flush", "INT": "stop", "HUP": "stop"}


class ConfigError(SuperviseError):
    """The user's configuration cannot be used."""


class Settings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every setting with its default. Durations: seconds, or text like `90s`, `2m`, `1h`."""

    name: str | None = None
    """Name of the run; default: Slurm's job id, else the script's name and a digest of the command."""
    checkpoints: str | None = None
    """Folder of checkpoints; default: what the script tells, or `checkpoints`."""
    grace: Duration = 30.0
    """From a notice until the machine is gone, when the notice does not say."""
    signals: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_SIGNALS))
    """What signals to the supervisor mean: preempt, stop, flush or ignore; `preempt:120s` gives it a grace of its own."""
    notice_file: str | None = None
    """A file whose creation is a notice."""
    launcher: Literal["auto", "torchrun", "command"] = "auto"
    requeue: Literal["exit_code", "local"] = "exit_code"
    """After a preemption: exit 75, or launch again here."""
    relaunch_delay: Duration = 5.0
    """Pause before `requeue: local` launches again."""
    max_crashes: int = 10
    """Crashes survived within crash_window."""
    crash_window: Duration = "24h"
    backoff_first: Duration = 1.0
    backoff_max: Duration = "5m"
    keep_last: int | None = None
    """Newest whole checkpoints that stay; default: what the script says, else 3."""
    keep_every: int | None = None
    resume_argument: str = "default"
    """Appended to the command when there is a checkpoint: default (`--resume PATH`), hf, lightning, none, or a template with {path}."""
    on_supervisor_death: Literal["flush", "continue"] = "flush"
    wait_for_old: Duration | None = None
    """How long ranks of a supervisor that died may take to flush and leave; default: the grace."""
    attach_timeout: Duration = 60.0
    """After this it is said that no rank has attached."""
    run_root: str = ".supervise"
    fresh: bool = False
    """Start from scratch; this run's checkpoints are moved to set-aside/, never deleted."""
    quiet: bool = False


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], config_file: str | None
) -> tuple[Settings, dict[str, str]]:
    """Settings and, by key, where each non-default value came from. Raises ConfigError."""
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    layers = [*_file_layers(config_file), ("the environment", _from_environ(environ)), ("the command line", dict(flags))]
    for origin, values in layers:
        for key, value in values.items():
            if key not in Settings.__struct_fields__:
                near = difflib.get_close_matches(key, Settings.__struct_fields__, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(Settings.__struct_fields__)}"
                raise ConfigError(f"cannot use {key!r} from {origin}: no such setting{hint}")
            merged[key] = (
                _over(merged.get(key, DEFAULT_SIGNALS), value) if key == "signals" and isinstance(value, dict) else value
            )
            origins[key] = origin
    try:
        return msgspec.convert(merged, Settings, strict=False), origins
    except msgspec.ValidationError as error:
        key = (re.findall(r"\$\.(\w+)", str(error)) or ["?"])[0]
        choices = get_args(get_type_hints(Settings).get(key))
        text = f"choose {', '.join(choices)}" if choices and all(isinstance(one, str) for one in choices) else ""
        text = text or str(error).partition(" - at")[0].lower()
        raise ConfigError(
            f"cannot use {key} = {merged.get(key)!r} from {origins.get(key, 'the configuration')}: {text}"
        ) from None


def _over(rules: dict[str, Any], newer: dict[Any, Any]) -> dict[str, Any]:
    return {**rules, **{str(name): meaning for name, meaning in newer.items()}}  # YAML reads `10: flush` as a number


def _file_layers(config_file: str | None) -> list[tuple[str, dict[str, Any]]]:
    path = Path(config_file) if config_file else next((file for file in map(Path.expanduser, FILES) if file.is_file()), None)
    if path is None:
        return []
    import yaml  # 20 ms: only when there is a file

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"cannot read {path}: it must be a mapping of settings, not {type(content).__name__}")
    return [(str(path), {str(key).replace("-", "_"): value for key, value in content.items()})]


_NOT_SETTINGS = {
    "socket",
    "run_id",
    "attempt",
    "resume",
    "resume_step",
    "run_dir",
    "marker",
    "test_session",
    "config",
    "torch_index",
}


def _from_environ(environ: Mapping[str, str]) -> dict[str, str]:
    found = {name[10:].lower(): value for name, value in environ.items() if name.startswith("SUPERVISE_")}
    return {key: value for key, value in found.items() if key not in _NOT_SETTINGS}


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: Duration, key: str) -> float:
    """Seconds. Raises ConfigError naming `key`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"cannot use {key} = {value!r}: not a duration; write seconds, or a number with s, m, h or d")
    return float(match[1]) * _UNITS[match[2]]


def parse_signals(rules: Mapping[str, str], grace_s: float) -> tuple[tuple[SignalRule, ...], tuple[int, ...]]:
    """Rules by signal, and the signals to ignore; the last rule of a signal counts, however it is spelled.

    Names with or without SIG, in any case, or numbers. Raises ConfigError for unknown or uncatchable ones.
    """
    parsed: dict[int, SignalRule] = {}
    ignored: dict[int, None] = {}
    for spelled, meaning in rules.items():
        number = _signal_number(spelled)
        action, _, grace = str(meaning).partition(":")
        if action == "ignore":
            parsed.pop(number, None)
            ignored[number] = None
            continue
        ignored.pop(number, None)
        if action not in ("preempt", "stop", "flush"):
            raise ConfigError(f"cannot use signals.{spelled} = {meaning!r}: choose preempt, stop, flush or ignore")
        known: Action = action  # type: ignore[assignment]
        seconds = parse_duration(grace, f"signals.{spelled}") if grace else grace_s
        parsed[number] = SignalRule(number, signal.Signals(number).name, known, seconds)
    return tuple(parsed.values()), tuple(ignored)


def _signal_number(spelled: str) -> int:
    text = str(spelled).strip().upper()
    try:
        number = int(text) if text.isdigit() else signal.Signals["SIG" + text.removeprefix("SIG")].value
        name = signal.Signals(number).name
    except (KeyError, ValueError):
        near = difflib.get_close_matches("SIG" + text.removeprefix("SIG"), [entry.name for entry in signal.Signals], 1)
        raise ConfigError(
            f"cannot use signal {spelled!r}: no such signal" + (f"; did you mean {near[0]}?" if near else "")
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD) or name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        raise ConfigError(f"cannot use signal {spelled!r}: {name} cannot serve as a notice")
    return number


def default_name(argv: tuple[str, ...], environ: Mapping[str, str], cwd: Path) -> str:
    """Slurm's array task or job id inside a batch job, else the script's name and a digest of command and folder: stable over restarts."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"slurm-{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}"
    script = next((word for word in argv if re.fullmatch(r"[^-].*\.(py|sh)", word)), argv[0])
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(script).stem).lstrip("._-")[:40] or "run"
    digest = hashlib.sha256("\0".join((str(cwd), *argv)).encode("utf-8", "surrogateescape")).hexdigest()
    return f"{stem}-{digest[:8]}"


def make_spec(argv: tuple[str, ...], settings: Settings, environ: Mapping[str, str], cwd: Path) -> JobSpec:
    """The run described by `settings`. Raises ConfigError."""
    name = settings.name if settings.name is not None else default_name(argv, environ, cwd)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise ConfigError(
            f"cannot use name {name!r}: letters, digits, dot, dash and underscore only, at most 128, not beginning with a dot"
        )
    grace_s = parse_duration(settings.grace, "grace")
    if settings.max_crashes < 0:
        raise ConfigError(f"cannot use max_crashes = {settings.max_crashes}: it must not be negative")
    for key in ("keep_last", "keep_every"):
        value = getattr(settings, key)
        if value is not None and value < 1:
            raise ConfigError(f"cannot use {key} = {value}: at least 1 (the newest whole checkpoint always stays)")
    signals, ignored_signals = parse_signals(settings.signals, grace_s)
    wait_for_old = settings.wait_for_old if settings.wait_for_old is not None else settings.grace
    return JobSpec(
        argv=argv,
        name=name,
        run_id=name,
        run_root=cwd / settings.run_root,
        checkpoints=None if settings.checkpoints is None else cwd / Path(settings.checkpoints).expanduser(),
        grace_s=grace_s,
        signals=signals,
        ignored_signals=ignored_signals,
        notice_file=None if settings.notice_file is None else cwd / settings.notice_file,
        launcher=settings.launcher,
        requeue=settings.requeue,
        relaunch_delay_s=parse_duration(settings.relaunch_delay, "relaunch_delay"),
        resume_argument=_resume_template(settings.resume_argument),
        on_supervisor_death=settings.on_supervisor_death,
        fresh=settings.fresh,
        wait_for_old_s=parse_duration(wait_for_old, "wait_for_old"),
        retention=Retention(keep_last=settings.keep_last or 3, keep_every=settings.keep_every),
        retention_given=settings.keep_last is not None or settings.keep_every is not None,
        limits=_limits(settings, grace_s),
        quiet=settings.quiet,
    )


def _limits(settings: Settings, grace_s: float) -> Limits:
    return Limits(
        attach_s=parse_duration(settings.attach_timeout, "attach_timeout"),
        default_grace_s=grace_s,
        restart=RestartPolicy(
            max_crashes=settings.max_crashes,
            window_s=parse_duration(settings.crash_window, "crash_window"),
            backoff_first_s=parse_duration(settings.backoff_first, "backoff_first"),
            backoff_max_s=parse_duration(settings.backoff_max, "backoff_max"),
        ),
    )


def _resume_template(text: str) -> tuple[str, ...]:
    if text in PRESETS:
        return PRESETS[text]
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"cannot use resume_argument = {text!r}: {error}") from None
    if not any("{path}" in word for word in words):
        raise ConfigError(f"cannot use resume_argument = {text!r}: it needs {{path}}, or choose one of {', '.join(PRESETS)}")
    return words


def config_path(environ: Mapping[str, str], flag: str | None) -> str | None:
    """The file named by --config or SUPERVISE_CONFIG, if any."""
    return flag or environ.get("SUPERVISE_CONFIG") or None


def current_environ() -> Mapping[str, str]:
    """The environment, as the only place that reads it."""
    return os.environ
