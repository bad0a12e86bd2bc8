"""The verb `status`: why a run is where it is, what was lost, what happens next."""

import time
from pathlib import Path

import click
import msgspec

from supervise_daemon.cli.find import find_run, run_root_option
from supervise_daemon.runtime.status import Status, as_json, is_live


@click.command()
@click.argument("run", required=False)
@run_root_option
@click.option("--json", "as_object", is_flag=True, help="The whole of status.json, plus `live`.")
def status(run: str | None, run_root: Path, as_object: bool) -> None:
    """Why it stopped, which rank, what was lost, what happens next."""
    path, found = find_run(run_root, run)
    if as_object:
        click.echo(msgspec.json.format(msgspec.json.encode(as_json(found))).decode())
    else:
        click.echo(describe(found, is_live(found), time.time(), path))


def describe(status: Status, live: bool, now: float, path: Path) -> str:
    """The text of `supervise status`. Pure."""
    ended = status.outcome is not None
    head = status.outcome if ended else status.phase
    if not live and not ended:
        head = f"supervisor is gone (it was {status.phase})"
    lines = [f"{status.name}: {head}" + (f", exit code {status.exit_code}" if status.exit_code is not None else "")]
    rows = [("why", status.reason), ("next", "run the same command again to go on" if not live and not ended else status.next)]
    rows.append(("attempt", f"{status.attempt} ({status.crashes} crashes, {status.preemptions} preemptions so far)"))
    rows.append(("command", " ".join(status.command)))
    if status.resume is not None:
        rows.append(("started from", f"step {status.resume_step}: {status.resume}"))
    if status.step is not None:
        speed = f", {status.step_s:.3g} s a step" if status.step_s else ""
        rows.append(("step", f"{status.step}{speed}"))
    saved = "none proved whole yet" if status.newest_step is None else f"step {status.newest_step}"
    rows.append(("checkpoint", f"{saved} in {status.checkpoints}" if status.checkpoints else saved))
    rows.append(("steps lost", f"{status.lost_steps_total} (done again) since supervise started"))
    if status.notice is not None:
        left = "" if status.deadline_at is None else f", {max(0.0, status.deadline_at - now):.0f} s left"
        rows.append(("notice", status.notice + left))
    rows.append(("records", str(path)))
    lines += [f"  {name + ':':<14}{text}" for name, text in rows if text]
    lines += _ranks(status) if live else []
    lines += _failure(status)
    return "\n".join(lines)


def _ranks(status: Status) -> list[str]:
    lines = (
        [f"  ranks: {len(status.ranks)} of {status.world_size or '?'} attached"] if status.ranks else ["  ranks: none attached"]
    )
    for name, rank in sorted(status.ranks.items(), key=lambda item: int(item[0]))[:16]:
        values = " ".join(f"{key}={value:.4g}" for key, value in rank.values.items())
        gone = "" if rank.attached else " GONE"
        lines.append(f"    rank {name} pid {rank.pid} step {rank.step} {rank.activity}{gone} {values}".rstrip())
    return lines


def _failure(status: Status) -> list[str]:
    failure = status.failure
    if failure is None:
        return []
    lines = [f"  last failure (attempt {failure.attempt}): {failure.what}"]
    if failure.lost_steps is not None:
        lines.append(f"    steps lost by it: {failure.lost_steps}")
    shown = failure.traceback.splitlines() or failure.output
    return lines + [f"    | {line}" for line in shown[-20:]]
