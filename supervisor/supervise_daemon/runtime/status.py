"""What `status.json` says: replaced at each change, so that observers never ask the daemon. Times are wall seconds."""

from pathlib import Path
from typing import Any

import msgspec

from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.identity import ProcessIdentity, is_alive


class RankStatus(msgspec.Struct, kw_only=True):
    """One attached rank."""

    pid: int
    step: int | None = None
    epoch: int | None = None
    activity: str = "setup"
    values: dict[str, float] = {}
    attached: bool = True


class FailureStatus(msgspec.Struct, kw_only=True):
    """How the last failed attempt failed."""

    attempt: int
    what: str
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    traceback: str = ""
    lost_steps: int | None = None
    """Steps done after the newest whole checkpoint: they are done again."""
    output: list[str] = []
    """Last lines of the attempt's output."""


class Status(msgspec.Struct, kw_only=True):
    """The whole of status.json."""

    schema: int = 1
    name: str
    run_id: str
    command: list[str]
    """Known secret options are masked."""
    supervisor: ProcessIdentity
    started_at: float
    changed_at: float = 0.0
    phase: str = "WAITING"
    reason: str = ""
    """Why the phase or outcome is what it is."""
    next: str = ""
    """What happens next."""
    attempt: int = 0
    resume: str | None = None
    resume_step: int | None = None
    step: int | None = None
    step_s: float | None = None
    world_size: int | None = None
    ranks: dict[str, RankStatus] = {}
    notice: str | None = None
    deadline_at: float | None = None
    checkpoints: str | None = None
    newest_step: int | None = None
    newest_path: str | None = None
    lost_steps_total: int = 0
    crashes: int = 0
    preemptions: int = 0
    failure: FailureStatus | None = None
    outcome: str | None = None
    exit_code: int | None = None
    socket: str | None = None
    output: str | None = None
    polls: dict[str, float] = {}
    """Declared wake-ups: name and seconds."""


def encode_status(status: Status) -> bytes:
    """The content of the file."""
    return msgspec.json.format(msgspec.json.encode(status), indent=1) + b"\n"


def read_status(path: Path) -> Status:
    """Raises FileNotFoundError, ContractError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ContractError(f"cannot read {path}: {error}") from None


def is_live(status: Status) -> bool:
    """Whether the supervisor that wrote it still runs, here. A pid alone would not do: it may be a stranger's by now."""
    return is_alive(status.supervisor)


def mask_secrets(argv: list[str] | tuple[str, ...]) -> list[str]:
    """The command with the values of options that look like secrets replaced: run files lie on shared disks."""
    masked: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and any(
            part in name.lower() for part in ("token", "password", "passwd", "secret", "api-key", "api_key", "apikey")
        )
        if hide_next and not word.startswith("-"):
            masked.append("***")
        elif secret and equals:
            masked.append(f"{name}=***")
        else:
            masked.append(word)
        hide_next = secret and not equals
    return masked


def as_json(status: Status) -> dict[str, Any]:
    """For `--json`: the file's content plus `live`."""
    return {**msgspec.to_builtins(status), "live": is_live(status)}
