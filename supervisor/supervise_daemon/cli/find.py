"""Finding a run by name for the verbs that look at one: status, ps, logs, flush, preempt, stop."""

from pathlib import Path

import click

from supervise_daemon.runtime.status import Status, is_live, read_status
from supervise_hooks.contract.errors import ContractError


def run_root_option(command: click.decorators.FC) -> click.decorators.FC:
    """The option `--run-root`."""
    return click.option(
        "--run-root",
        default=".supervise",
        show_default=True,
        envvar="SUPERVISE_RUN_ROOT",
        help="Where run directories are.",
        type=click.Path(path_type=Path),
    )(command)


def all_runs(root: Path) -> list[tuple[Path, Status]]:
    """Every run with a readable status, newest change first. Unreadable ones are said on stderr."""
    found = []
    for path in sorted(root.glob("*/status.json")):
        try:
            found.append((path.parent, read_status(path)))
        except (ContractError, OSError) as error:
            click.echo(f"supervise: {error}", err=True)
    return sorted(found, key=lambda run: run[1].changed_at, reverse=True)


def find_run(root: Path, name: str | None) -> tuple[Path, Status]:
    """The run called `name`; without a name the only live one, else the one that changed last. Raises UsageError."""
    runs = all_runs(root)
    if name is not None:
        for path, status in runs:
            if status.name == name:
                return path, status
        known = ", ".join(status.name for _, status in runs[:8]) or "none"
        raise click.UsageError(f"cannot find run {name!r} in {root}: known runs: {known}")
    live = [run for run in runs if is_live(run[1])]
    if len(live) > 1:
        raise click.UsageError(f"cannot choose a run: {len(live)} are live ({', '.join(run[1].name for run in live)}); name one")
    if not runs:
        raise click.UsageError(f"cannot find any run in {root}; pass --run-root, or start one")
    return (live or runs)[0]
