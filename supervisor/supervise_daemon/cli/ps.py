"""The verb `ps`: runs of this folder, one a line."""

import time
from pathlib import Path

import click
import msgspec

from supervise_daemon.cli.find import all_runs, run_root_option
from supervise_daemon.runtime.status import as_json, is_live


@click.command()
@run_root_option
@click.option("--json", "as_list", is_flag=True, help="An array of status objects, with `live`.")
def ps(run_root: Path, as_list: bool) -> None:
    """What is running here, and how the others ended."""
    runs = [status for _, status in all_runs(run_root)]
    if as_list:
        click.echo(msgspec.json.format(msgspec.json.encode([as_json(status) for status in runs])).decode())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for title in ("RUN", "STATE", "ATTEMPT", "STEP", "CHECKPOINT", "CRASHES", "PREEMPTED", "CHANGED"):
        table.add_column(title)
    for status in runs:
        live = is_live(status)
        state = status.phase if live else (status.outcome or f"DEAD ({status.phase})")
        table.add_row(
            status.name,
            state,
            str(status.attempt),
            _number(status.step),
            _number(status.newest_step),
            str(status.crashes),
            str(status.preemptions),
            f"{max(0, int(time.time() - status.changed_at))} s ago",
        )
    Console().print(table if runs else f"no runs in {run_root}")


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
