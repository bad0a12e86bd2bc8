"""The verb `checkpoints`: what is there, and which one a resume would choose."""

import os
import sys
import time
from pathlib import Path

import click
import msgspec

from supervise_daemon.core.resume import Choice, Refusal, ResumeFacts, choose_resume_point, why_passed_over
from supervise_daemon.formats import catalog
from supervise_hooks.contract.verification import Depth


@click.command()
@click.argument("folder", required=False, metavar="[DIR]", type=click.Path(path_type=Path), envvar="SUPERVISE_CHECKPOINTS", default=Path("checkpoints"))
@click.option("--run-id", help="Whose checkpoints count. Default: the run of the newest one.")
@click.option("--full", is_flag=True, help="Read every byte and compare digests.")
@click.option("--json", "as_list", is_flag=True, help='Like `verify --json`, newest step first, with "resume": true on the one a resume would choose.')
def checkpoints(folder: Path, run_id: str | None, full: bool, as_list: bool) -> None:
    """Every checkpoint in DIR: format, size, age, verdict, and which one a resume would choose and why.

    DIR: default $SUPERVISE_CHECKPOINTS, else ./checkpoints.
    """
    depth: Depth = "full" if full else "quick"
    state = catalog.folder_state(folder)
    if state in ("absent", "not a folder", "unreadable"):
        raise click.UsageError(f"cannot list checkpoints: {folder} {'does not exist' if state == 'absent' else 'is ' + state}")
    found = catalog.scan(folder, depth)
    owner = run_id or next((item.candidate.run_id for item in found if item.candidate.run_id is not None), None) or ""
    facts = ResumeFacts(run_id=owner, folder=state, folder_path=str(folder), first_attempt=True, ever_whole=False)
    decision = choose_resume_point([item.candidate for item in found], facts)
    chosen = decision.path if isinstance(decision, Choice) else None
    if as_list:
        rows = [msgspec.to_builtins(item.inspection) | {"resume": item.candidate.path == chosen} for item in found]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    _print_table(found, chosen, owner)
    click.echo(f"resume: {decision.reason}", err=isinstance(decision, Refusal))
    sys.exit(0)


def _print_table(found: list[catalog.Found], chosen: str | None, owner: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for title in ("", "STEP", "NAME", "FORMAT", "REASON", "SIZE", "AGE", "VERDICT", "WHY NOT"):
        table.add_column(title, justify="right" if title in ("STEP", "SIZE", "AGE") else "left", overflow="fold")
    for item in found:
        manifest = item.manifest
        verdict = {"WHOLE": "[green]WHOLE", "TORN": "[red]TORN"}.get(item.inspection.verdict, "UNKNOWN")
        table.add_row(
            "→" if item.candidate.path == chosen else "",
            "-" if item.candidate.step is None else str(item.candidate.step),
            item.path.name,
            item.inspection.format,
            manifest.reason if manifest is not None else "-",
            _size(manifest.size if manifest is not None else _on_disk(item.path)),
            _age(item.path),
            "being written" if item.candidate.state == "writing" else verdict,
            why_passed_over(item.candidate, owner) or "",
        )
    Console().print(table if found else "no checkpoints")


def _on_disk(path: Path) -> int:
    try:
        if path.is_file():
            return path.stat().st_size
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(path))
    except OSError:
        return 0


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _age(path: Path) -> str:
    try:
        seconds = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return "-"
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
