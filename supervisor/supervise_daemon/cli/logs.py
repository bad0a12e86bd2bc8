"""The verb `logs`: the output of an attempt."""

import os
import sys
import time
from pathlib import Path

import click

from supervise_daemon.cli.find import find_run, run_root_option
from supervise_daemon.runtime.status import is_live, read_status


@click.command()
@click.argument("run", required=False)
@run_root_option
@click.option("--attempt", type=int, help="Which attempt. Default: the newest.")
@click.option("--lines", "-n", default=50, show_default=True, help="How many lines from the end; 0: all.")
@click.option("--follow", "-f", is_flag=True, help="Go on printing, over restarts, until the run ends.")
def logs(run: str | None, run_root: Path, attempt: int | None, lines: int, follow: bool) -> None:
    """Print what the job printed."""
    path, status = find_run(run_root, run)
    number = attempt if attempt is not None else status.attempt
    log = path / "attempts" / f"{number:04d}" / "output.log"
    if not log.is_file():
        have = ", ".join(sorted(os.listdir(path / "attempts"))) if (path / "attempts").is_dir() else "none"
        raise click.UsageError(f"cannot print attempt {number} of {status.name}: it has no output; attempts: {have}")
    position = _print_end(log, lines)
    while follow:
        try:
            position = _print_from(log, position)
            newest = read_status(path / "status.json")
            if attempt is None and newest.attempt != number:
                number, position = newest.attempt, 0
                log = path / "attempts" / f"{number:04d}" / "output.log"
                click.echo(f"--- attempt {number}")
            elif not is_live(newest):
                _print_from(log, position)
                return
            time.sleep(0.5)
        except (KeyboardInterrupt, BrokenPipeError):
            return


def _print_end(log: Path, lines: int) -> int:
    """Print the last lines without reading a huge file whole; the position reached."""
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start, found = size, b""
        while lines > 0 and start > 0 and found.count(b"\n") <= lines:
            start = max(0, start - (1 << 16))
            file.seek(start)
            found = file.read(size - start)
        if lines == 0:
            return _print_from(log, 0)
        sys.stdout.buffer.write(b"".join(found.splitlines(keepends=True)[-lines:]))
        sys.stdout.flush()
        return size


def _print_from(log: Path, position: int) -> int:
    try:
        with log.open("rb") as file:
            file.seek(position)
            while chunk := file.read(1 << 16):
                sys.stdout.buffer.write(chunk)
                position += len(chunk)
    except FileNotFoundError:
        return position  # the attempt is just being launched
    sys.stdout.flush()
    return position
