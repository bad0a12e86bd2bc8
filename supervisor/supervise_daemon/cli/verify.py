"""The verb `verify`: is it whole?"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from supervise_daemon.formats import catalog
from supervise_daemon.formats.registry import recognise
from supervise_hooks.contract.verification import Depth, Inspection


def inspect_path(path: Path, depth: Depth, on_bytes: Callable[[int], None] | None) -> list[Inspection]:
    """The checkpoint at `path`, or every checkpoint in the folder `path`; something else is UNKNOWN, with what was seen."""
    form = recognise(path)
    if form is not None:
        return [form.inspect(path, depth, on_bytes)]
    if path.is_dir():
        try:
            found = catalog.scan(path, depth, on_bytes)
            seen = ", ".join(sorted(os.listdir(path))[:5])
        except OSError as error:
            return [_unknown(path, depth, f"it cannot be read: {error.strerror}")]
        return [checkpoint.inspection for checkpoint in found] or [_unknown(path, depth, f"no known format; it holds: {seen or 'nothing'}")]
    return [_unknown(path, depth, f"no known format: a file ending in {path.suffix or 'nothing'}")]


def _unknown(path: Path, depth: Depth, what: str) -> Inspection:
    return Inspection(path=str(path), format="unknown", step=None, verdict="UNKNOWN", depth=depth, problems=(what,))


def total_bytes(paths: list[Path]) -> int:
    """Bytes below the paths, for a progress bar."""
    total = 0
    for path in paths:
        if path.is_file():
            total += path.stat().st_size
        for folder, _, names in os.walk(path):
            total += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    return total


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@click.option("--full", is_flag=True, help="Read every byte and compare digests (or zip CRCs); otherwise presence, sizes and headers.")
@click.option("--json", "as_list", is_flag=True, help="An array of {path, format, step, verdict, depth, problems, caveats}.")
def verify(paths: tuple[Path, ...], full: bool, as_list: bool) -> None:
    """Prove checkpoints whole, without torch and without unpickling anything.

    PATH is a checkpoint, or a folder of checkpoints. Exit code 0: all are whole; 1: one is not, or nothing proves it; 2: usage.
    """
    depth: Depth = "full" if full else "quick"
    if full and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        with Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("", total=total_bytes(list(paths)))
            found = [item for path in paths for item in inspect_path(path, depth, lambda count: progress.advance(task, count))]
    else:
        found = [item for path in paths for item in inspect_path(path, depth, None)]
    if as_list:
        click.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for inspection in found:
            click.echo(describe(inspection))
    sys.exit(0 if all(inspection.verdict == "WHOLE" for inspection in found) else 1)


def describe(inspection: Inspection) -> str:
    """Lines for people."""
    step = "" if inspection.step is None else f", step {inspection.step}"
    lines = [f"{inspection.verdict:<7} {inspection.path} ({inspection.format}{step}, {inspection.depth})"]
    lines += [f"        problem: {problem}" for problem in inspection.problems[:20]]
    if len(inspection.problems) > 20:
        lines.append(f"        … and {len(inspection.problems) - 20} more problems (--json lists all)")
    lines += [f"        caveat: {caveat}" for caveat in inspection.caveats]
    return "\n".join(lines)
