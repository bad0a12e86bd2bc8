"""The verb `run`: supervise a command. The default verb."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from supervise_daemon.config import ConfigError, Settings, config_path, load_settings, make_spec
from supervise_daemon.job_spec import JobSpec
from supervise_hooks.contract import exit_codes
from supervise_hooks.contract.errors import SuperviseError

_DEFAULT = Settings()


def _signal_flags(pairs: tuple[str, ...]) -> dict[str, str]:
    rules = {}
    for pair in pairs:
        name, equals, meaning = pair.partition("=")
        rules[name] = meaning if equals else "preempt"
    return rules


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False, "show_default": True})
@click.option(
    "--name",
    help="Name of the run; its records are in .supervise/NAME. Default: the Slurm job id, else script name and a digest.",
)
@click.option("--checkpoints", metavar="DIR", help="Folder of checkpoints. Default: what the script tells, else `checkpoints`.")
@click.option(
    "--grace", metavar="TIME", help=f"From a notice until the machine is gone, e.g. 120 or 2m. [default: {_DEFAULT.grace:g} s]"
)
@click.option(
    "--signal",
    "signals",
    multiple=True,
    metavar="SIG[=MEANING]",
    help="What a signal to supervise means: preempt (default), stop, flush or ignore, with its own grace as in USR1=preempt:120s. "
    "Without this: TERM and USR1 preempt, USR2 flush, INT and HUP stop. Repeatable.",
)
@click.option(
    "--notice-file",
    metavar="PATH",
    help="A file whose creation is a preemption notice; its first line may name the seconds left.",
)
@click.option(
    "--requeue",
    metavar="HOW",
    help="After a preemption: exit_code (leave with 75) or local (launch again here). [default: exit_code]",
)
@click.option("--relaunch-delay", metavar="TIME", help="Pause before --requeue local launches again. [default: 5 s]")
@click.option(
    "--max-crashes",
    type=int,
    help=f"Crashes survived within --crash-window; preemptions are not crashes. [default: {_DEFAULT.max_crashes}]",
)
@click.option("--crash-window", metavar="TIME", help="[default: 24h]")
@click.option(
    "--backoff-first",
    metavar="TIME",
    help="Pause after the first crash; it doubles with each one without progress. [default: 1 s]",
)
@click.option("--backoff-max", metavar="TIME", help="[default: 5m]")
@click.option(
    "--keep-last", type=int, metavar="N", help="Newest whole checkpoints that stay. [default: what the script says, else 3]"
)
@click.option("--keep-every", type=int, metavar="STEPS", help="Also keep checkpoints of steps divisible by this.")
@click.option(
    "--resume-argument",
    metavar="TEMPLATE",
    help="Appended to COMMAND when there is a checkpoint: default (--resume PATH), hf, lightning, none, or e.g. '--load {path}'.",
)
@click.option(
    "--on-supervisor-death",
    metavar="WHAT",
    help="What ranks do when supervise is killed: flush (and leave) or continue. [default: flush]",
)
@click.option(
    "--wait-for-old",
    metavar="TIME",
    help="How long ranks of a killed supervise may take to leave before they are killed. [default: the grace]",
)
@click.option("--attach-timeout", metavar="TIME", help="After this it is said that no rank uses supervise_hooks. [default: 60 s]")
@click.option("--launcher", metavar="NAME", help="auto, torchrun or command. [default: auto]")
@click.option("--run-root", metavar="DIR", help="Where run directories are. [default: .supervise]")
@click.option(
    "--fresh",
    is_flag=True,
    default=None,
    help="Start from scratch; this run's checkpoints are moved to set-aside/, never deleted.",
)
@click.option("--quiet", is_flag=True, default=None, help="Print nothing of our own; the records are in the run directory.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    help="YAML settings. Default: supervise.yaml here, in ~/.config/supervise, in /etc/supervise.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and why, start nothing.")
@click.option("--detach", is_flag=True, help="Go to the background; follow with `supervise logs`.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    command: tuple[str, ...], signals: tuple[str, ...], config_file: str | None, dry_run: bool, detach: bool, **flags: Any
) -> None:
    """Supervise COMMAND (the default verb).

    \b
    Exit codes: 0 finished; 75 preempted, run the same command again; the job's own code when it failed
    for good; 128+n stopped by signal n; 2 usage; 66 no checkpoint can be resumed from; 73 already running.
    """
    if command and command[0] == "--":
        command = command[1:]
    given = {key: value for key, value in flags.items() if value is not None}
    if signals:
        given["signals"] = _signal_flags(signals)
    try:
        if not command:
            raise ConfigError("cannot run nothing: give a command, e.g. `supervise torchrun train.py`")
        settings, _ = load_settings(given, os.environ, config_path(os.environ, config_file))
        spec = make_spec(command, settings, os.environ, Path.cwd())
    except ConfigError as error:
        click.echo(f"supervise: {error}", err=True)
        sys.exit(exit_codes.USAGE)
    if dry_run:
        from supervise_daemon.cli.plan import describe_plan

        click.echo(describe_plan(spec))
        return
    if detach:
        _detach(spec)
    sys.exit(supervise_command(spec))


def supervise_command(spec: JobSpec) -> int:
    """Run to the end; the exit code. Signals are ours from the first moment on."""
    from supervise_daemon.runtime.signals import SignalInbox, is_ignored

    numbers = [number for number in (*(rule.number for rule in spec.signals), *spec.ignored_signals) if not is_ignored(number)]
    import signal

    with SignalInbox([*numbers, signal.SIGCHLD]) as inbox:
        from supervise_daemon import assembly
        from supervise_daemon.runtime.run_dir import AlreadyRunning

        try:
            return assembly.supervise(spec, inbox)
        except AlreadyRunning as error:
            click.echo(f"supervise: {error}", err=True)
            return exit_codes.ALREADY_RUNNING
        except SuperviseError as error:
            click.echo(f"supervise: {error}", err=True)
            return exit_codes.INTERNAL
        except Exception:  # noqa: BLE001 - whatever it is, it must not look like the job's own exit code 1
            click.echo(f"supervise: our own fault, please report:\n{traceback.format_exc()}", err=True)
            return exit_codes.INTERNAL


def _detach(spec: JobSpec) -> None:
    """Two forks, so that nobody waits for us; the parent says where to look and leaves."""
    if os.fork():
        click.echo(
            f"supervising {spec.name} in the background\n  supervise status {spec.name}\n  supervise logs --follow {spec.name}"
        )
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    folder = spec.run_root / spec.name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = os.open(folder / "supervise.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, null), (2, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
