"""The verb `verify`: whether checkpoints are whole."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from supervise_daemon.formats import catalog
from supervise_daemon.formats.registry import recognise
from supervise_hooks.contract.verification import Depth, Inspection

OnBytes = Callable[[int], None]
_SHOWN = 20


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@click.option("--full", is_flag=True, help="Read every byte and compare digests (or zip CRCs); else presence, sizes, headers.")
@click.option("--json", "as_list", is_flag=True, help="An array of {path, format, step, verdict, depth, problems, caveats}.")
def verify(paths: tuple[Path, ...], full: bool, as_list: bool) -> None:
    """Prove checkpoints whole, without torch and without unpickling anything.

    PATH is a checkpoint, or a folder of checkpoints: then each in it.

    \b
    WHOLE    proved, to the depth asked
    TORN     something is missing or changed; every problem is listed
    UNKNOWN  nothing in it could prove it
    A caveat is what this format carries no evidence for.

    Exit code 0: all are whole; 1: one is not, or nothing proves it; 2: usage.

    \b
    Examples:
        supervise verify checkpoints --full
        supervise verify checkpoints/step-000001000 && python evaluate.py
    """
    depth: Depth = "full" if full else "quick"
    with progress_bar(list(paths), wanted=full) as on_bytes:
        found = [inspection for path in paths for inspection in inspect_path(path, depth, on_bytes)]
    if as_list:
        click.echo(as_json(found))
    else:
        for inspection in found:
            click.echo(describe(inspection))
    sys.exit(0 if all(inspection.verdict == "WHOLE" for inspection in found) else 1)


def inspect_path(path: Path, depth: Depth, on_bytes: OnBytes | None) -> list[Inspection]:
    """The checkpoint at `path`, or every checkpoint in the folder `path`; something else is UNKNOWN, with what was seen."""
    form = recognise(path)
    if form is not None:
        return [form.inspect(path, depth, on_bytes)]
    if not path.is_dir():
        kind = "no regular file" if not path.is_file() else f"a file ending in {path.suffix or 'nothing'}"
        return [_unknown(path, depth, f"no known checkpoint format: {kind}")]
    try:
        found = catalog.scan(path, depth, on_bytes)
        seen = sorted(os.listdir(path))
    except OSError as error:
        return [_unknown(path, depth, f"it cannot be read: {error.strerror}")]
    names = ", ".join(seen[:5]) + (f" and {len(seen) - 5} more" if len(seen) > 5 else "")
    inspections = [checkpoint.inspection for checkpoint in found]
    return inspections or [_unknown(path, depth, f"no checkpoint in it; it holds {names or 'nothing'}")]


def _unknown(path: Path, depth: Depth, what: str) -> Inspection:
    return Inspection(path=str(path), format="unknown", step=None, verdict="UNKNOWN", depth=depth, problems=(what,))


def describe(inspection: Inspection) -> str:
    """Lines for people."""
    step = "" if inspection.step is None else f", step {inspection.step}"
    lines = [f"{inspection.verdict:<7} {printable(inspection.path)} ({inspection.format}{step}, {inspection.depth})"]
    lines += [f"        problem: {printable(problem)}" for problem in inspection.problems[:_SHOWN]]
    if len(inspection.problems) > _SHOWN:
        lines.append(f"        … and {len(inspection.problems) - _SHOWN} more problems (--json lists all)")
    lines += [f"        caveat: {printable(caveat)}" for caveat in inspection.caveats]
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text in one line that is safe on a terminal: names on disk may hold newlines, escapes and bytes that are no UTF-8."""
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def as_json(rows: object) -> str:
    """Indented JSON. Names that are not UTF-8 are escaped: JSON cannot hold them."""
    return msgspec.json.format(msgspec.json.encode(_encodable(msgspec.to_builtins(rows)))).decode()


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return {key: _encodable(item) for key, item in value.items()} if isinstance(value, dict) else value


@contextlib.contextmanager
def progress_bar(paths: list[Path], *, wanted: bool) -> Iterator[OnBytes | None]:
    """What to call with bytes read; draws a bar on stderr while the block runs, if that is a terminal."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=_total_bytes(paths))
        yield lambda count: progress.advance(task, count)


def _total_bytes(paths: list[Path]) -> int:
    """Bytes of and below the paths; about, since files may come and go."""
    total = 0
    for path in paths:
        files = [path] if not path.is_dir() else [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        for file in files:
            with contextlib.suppress(OSError):
                total += file.lstat().st_size
    return total
