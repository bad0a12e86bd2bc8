"""The verb `checkpoints`: what is there, and which one a resume would choose."""

import os
import time
from pathlib import Path

import click
import msgspec

from supervise_daemon.cli.verify import as_json, printable, progress_bar
from supervise_daemon.core.resume import Choice, ResumeFacts, choose_resume_point, why_passed_over
from supervise_daemon.formats import catalog
from supervise_hooks.contract.verification import Depth

_PLAIN_WIDTH = 200
"""Columns when the output is no terminal: nothing is folded in a log."""


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), envvar="SUPERVISE_CHECKPOINTS", default="checkpoints")
@click.option("--run-id", help="Whose checkpoints count (a run's id is its name). Default: whose the newest whole one is.")
@click.option("--full", is_flag=True, help="Read every byte and compare digests, as a resume does; else sizes and headers.")
@click.option("--json", "as_list", is_flag=True, help='As `verify --json`, newest step first; "resume": true on the choice.')
def checkpoints(folder: Path, run_id: str | None, full: bool, as_list: bool) -> None:
    """Every checkpoint in DIR: format, size, age, verdict, and which one a resume would choose and why.

    DIR: default $SUPERVISE_CHECKPOINTS, else ./checkpoints. Nothing is changed by looking.

    A resume takes the highest step that is whole and of the same run, whatever the names or dates say. Torn and unfinished
    ones, ones being written, and those of other runs are passed over; the last column says why.
    """
    depth: Depth = "full" if full else "quick"
    state = catalog.folder_state(folder)
    if state in ("absent", "not a folder", "unreadable"):
        why = {"absent": "does not exist", "unreadable": "cannot be read"}.get(state, "is not a folder")
        raise click.UsageError(f"cannot list checkpoints: {printable(str(folder))} {why}")
    with progress_bar([folder], wanted=full) as on_bytes:
        found = catalog.scan(folder, depth, on_bytes)
    owner = run_id if run_id is not None else _owner(found)
    facts = ResumeFacts(run_id=owner, folder=state, folder_path=str(folder), first_attempt=True, ever_whole=False)
    decision = choose_resume_point([item.candidate for item in found], facts)
    chosen = decision.path if isinstance(decision, Choice) else None
    if as_list:
        click.echo(as_json([_row(item, item.candidate.path == chosen) for item in found]))
        return
    _print_table(found, chosen, owner)
    whose = f"a resume of run {owner!r}" if owner else "a resume"
    click.echo(f"{whose} would start from: {printable(chosen or 'nothing')}")
    click.echo(f"  because: {printable(decision.reason)}")
    if not full:
        click.echo("  by a quick look: a resume itself reads every byte, as --full does")
    for path, why in decision.passed_over:
        click.echo(f"  passed over {printable(Path(path).name)}: {printable(why)}")


def _row(item: catalog.Found, resume: bool) -> dict[str, object]:
    row: dict[str, object] = msgspec.to_builtins(item.inspection)
    return row | {"resume": resume}


def _owner(found: list[catalog.Found]) -> str:
    """Run id of the newest whole one, else of the newest that says whose it is."""
    owned = [item.candidate for item in found if item.candidate.run_id is not None]
    return next((c.run_id for c in owned if c.state == "whole"), owned[0].run_id if owned else None) or ""


def _print_table(found: list[catalog.Found], chosen: str | None, owner: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold")
    for title in ("", "STEP", "NAME", "FORMAT", "REASON", "SIZE", "AGE", "VERDICT", "WHY NOT"):
        table.add_column(title, justify="right" if title in ("STEP", "SIZE", "AGE") else "left", overflow="fold")
    for item in found:
        manifest = item.manifest
        verdict = "being written" if item.candidate.state == "writing" else item.inspection.verdict
        style = {"WHOLE": "green", "TORN": "red"}.get(verdict, "yellow")
        cells = (
            "→" if item.candidate.path == chosen else "",
            "-" if item.candidate.step is None else str(item.candidate.step),
            printable(item.path.name),
            item.inspection.format,
            manifest.reason if manifest is not None else "-",
            _size(manifest.size if manifest is not None else _on_disk(item.path)),
            _age(item.path, manifest.sealed_at if manifest is not None else None),
        )
        # Text, not markup: a name may hold brackets.
        why_not = Text(printable(why_passed_over(item.candidate, owner) or ""))
        table.add_row(*map(Text, cells), Text(verdict, style=style), why_not)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(table if found else "no checkpoints")


def _on_disk(path: Path) -> int:
    """Bytes of a file, or of the files directly in a folder."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _age(path: Path, sealed_at: float | None) -> str:
    """Since it was sealed, else since its last change. For people: nothing is decided by it."""
    try:
        seconds = max(0.0, time.time() - (sealed_at if sealed_at is not None else path.stat().st_mtime))
    except OSError:
        return "-"
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
