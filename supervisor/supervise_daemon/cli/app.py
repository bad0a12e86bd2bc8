"""The command `supervise`: which verb, and `run` when the first word is none. Verbs are imported when used."""

import importlib
from typing import Any

import click

VERBS = {
    "run": "supervise_daemon.cli.run:run",
    "status": "supervise_daemon.cli.status:status",
    "ps": "supervise_daemon.cli.ps:ps",
    "logs": "supervise_daemon.cli.logs:logs",
    "flush": "supervise_daemon.cli.control:flush",
    "preempt": "supervise_daemon.cli.control:preempt",
    "stop": "supervise_daemon.cli.control:stop",
    "checkpoints": "supervise_daemon.cli.checkpoints:checkpoints",
    "verify": "supervise_daemon.cli.verify:verify",
}


class _Verbs(click.Group):
    """Everything that is not a verb is a command to run: `supervise torchrun train.py`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Options before the command belong to `run`; `supervise --help` and `--version` stay the group's.
        if args and args[0] not in VERBS and args[0] not in ("--help", "-h", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in VERBS:
            command = self.get_command(ctx, name)
            rows.append((name, command.get_short_help_str(90) if command else ""))
        with formatter.section("Verbs"):
            formatter.write_dl(rows)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="supervise-train", prog_name="supervise")
def app(**_: Any) -> None:
    """Keep a training job alive, and its work safe, on machines that are taken away.

    \b
    Put it in front of the command you already run:
        supervise torchrun --nproc-per-node 8 train.py
    At a preemption notice every rank saves at one common step, the checkpoint is proved whole, and supervise
    exits 75: run the same command again, anywhere, and it goes on from there. Crashes are recovered by itself.

    `supervise COMMAND ...` is short for `supervise run COMMAND ...`; see `supervise run --help` for the options.
    """
