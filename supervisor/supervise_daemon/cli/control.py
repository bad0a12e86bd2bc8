"""The verbs that ask a live supervisor for something: `flush`, `preempt`, `stop`."""

import sys
from pathlib import Path
from typing import Literal

import click

from supervise_daemon.cli.find import find_run, run_root_option
from supervise_daemon.config import ConfigError, parse_duration
from supervise_daemon.runtime.rank_server import ask_daemon
from supervise_daemon.runtime.status import is_live
from supervise_hooks.contract import messages
from supervise_hooks.contract.errors import ContractError


def _ask(verb: Literal["flush", "preempt", "stop"], run: str | None, run_root: Path, grace: str | None, timeout: str) -> None:
    try:
        grace_s = None if grace is None else parse_duration(grace, "grace")
        timeout_s = parse_duration(timeout, "timeout")
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    _, status = find_run(run_root, run)
    if not is_live(status) or status.socket is None:
        click.echo(
            f"supervise: cannot {verb} {status.name}: no supervisor runs it here (last seen {status.phase}: {status.reason})",
            err=True,
        )
        sys.exit(1)
    try:
        code = ask_daemon(status.socket, messages.Control(verb=verb, grace_s=grace_s), click.echo, timeout_s)
    except (OSError, ContractError) as error:
        click.echo(f"supervise: cannot {verb} {status.name}: {error}", err=True)
        sys.exit(1)
    sys.exit(code)


_run = click.argument("run", required=False)
_grace = click.option("--grace", metavar="TIME", help="Time until everything must be gone. Default: the run's own.")
_timeout = click.option("--timeout", default="10m", show_default=True, metavar="TIME", help="How long to wait for the answer.")


@click.command()
@_run
@run_root_option
@_timeout
def flush(run: str | None, run_root: Path, timeout: str) -> None:
    """Save now at a common step, verify, and go on training."""
    _ask("flush", run, run_root, None, timeout)


@click.command()
@_run
@run_root_option
@_grace
@_timeout
def preempt(run: str | None, run_root: Path, grace: str | None, timeout: str) -> None:
    """Rehearse a preemption notice: save, leave, requeue as a real one would."""
    _ask("preempt", run, run_root, grace, timeout)


@click.command()
@_run
@run_root_option
@_grace
@_timeout
def stop(run: str | None, run_root: Path, grace: str | None, timeout: str) -> None:
    """Save and end: no requeue."""
    _ask("stop", run, run_root, grace, timeout)
