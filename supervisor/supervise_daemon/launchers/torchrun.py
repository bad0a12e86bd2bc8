"""torchrun: what it needs in its environment, and what it tells of failed ranks. Pure. Facts seen in torch 2.13.

It is steered by PET_* and TORCH_ELASTIC_* variables, so the user's words stay as they are.
"""

import itertools
import re
from pathlib import PurePath

from supervise_daemon.core.restart import FailureReport
from supervise_daemon.launchers.resume_argument import with_resume
from supervise_daemon.ports import LaunchContext, LaunchPlan
from supervise_hooks.contract import exit_codes

_PYTHON = re.compile(r"python[\d.]*")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")


class TorchrunLauncher:
    """`torchrun ...` or `python -m torch.distributed.run ...`."""

    name = "torchrun"

    def recognises(self, argv: tuple[str, ...]) -> bool:
        """By the program's name, or by the module after `-m`."""
        program = PurePath(argv[0]).name
        if program in ("torchrun", "torchrun3"):
            return True
        return bool(_PYTHON.fullmatch(program)) and any(
            flag == "-m" and module in _MODULES for flag, module in itertools.pairwise(argv)
        )

    def plan(self, argv: tuple[str, ...], context: LaunchContext) -> LaunchPlan:
        """The user's words plus the resume argument; restarts are ours."""
        notes = []
        restarts = _max_restarts(argv)
        if restarts > 0:
            argv = _without_restarts(argv)
            notes.append(
                f"--max-restarts={restarts} is taken off torchrun: its restarts reuse a stale store (torch 2.13) and would multiply "
                "with ours; use `supervise --max-crashes` instead"
            )
        return LaunchPlan(
            argv=with_resume(argv, context.resume_argument, context.resume), env=environment(context), notes=tuple(notes)
        )

    def read_failures(self, output: str, leader_code: int) -> tuple[FailureReport, ...]:
        """From the summary torchrun prints at its end."""
        return parse_failures(output)


def environment(context: LaunchContext) -> dict[str, str]:
    """Variables that make torchrun a good child; harmless to anything else."""
    return {
        # Its default of 30 s would kill ranks in the middle of a longer flush.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(30, int(context.grace_s) + 10)),
        # torchrun copies the first failure of a function under @record here.
        "TORCHELASTIC_ERROR_FILE": str(context.attempt_dir / "error.json"),
        "PET_MAX_RESTARTS": "0",
    }


def _own_words(argv: tuple[str, ...]) -> int:
    """How many words come before the script: what follows is the script's business, whatever it is called."""
    return next((index for index, word in enumerate(argv) if word.endswith(".py") and not word.startswith("-")), len(argv))


def _max_restarts(argv: tuple[str, ...]) -> int:
    for index, word in enumerate(argv[: _own_words(argv)]):
        name, equals, value = word.partition("=")
        if name in ("--max-restarts", "--max_restarts"):
            text = value if equals else (argv[index + 1] if index + 1 < len(argv) else "")
            return int(text) if text.isdigit() else 0
    return 0


def _without_restarts(argv: tuple[str, ...]) -> tuple[str, ...]:
    own = _own_words(argv)
    kept: list[str] = []
    skip = done = False
    for word in argv[:own]:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in ("--max-restarts", "--max_restarts") and not done:
            done = True
            skip = not equals
        else:
            kept.append(word)
    return (*kept, *argv[own:])


_ROOT = re.compile(r"^Root Cause \(first observed failure\):", re.MULTILINE)
_ENTRY = re.compile(
    r"^\[\d+\]:\s*\n(?:\s+\w+\s*:.*\n)*?\s+rank\s*: (?P<rank>\d+) .*\n\s+exitcode\s*: (?P<code>-?\d+) \(pid: \d+\)(?P<rest>.*)\n"
    r"\s+error_file\s*:.*\n\s+traceback\s*: (?P<trace>.*(?:\n(?!\[\d+\]:|[-=]{10,}).*)*)",
    re.MULTILINE,
)


def parse_failures(output: str) -> tuple[FailureReport, ...]:
    """Reports from the last summary in `output`, root cause first; empty when there is none. A peer that was TERMed is no cause."""
    # tee and redirect options prefix lines; colours do not occur in the summary (torch 2.13).
    start = output.rfind("\nRoot Cause (first observed failure):")
    if start < 0:
        return ()
    begin = output.rfind("\nFailures:", 0, start)
    root = [_report(match) for match in _ENTRY.finditer(output, start)]
    others = [_report(match) for match in _ENTRY.finditer(output, begin, start)] if begin >= 0 else []
    return tuple(root[:1] + others)


def _report(match: re.Match[str]) -> FailureReport:
    code = int(match["code"])
    # torchrun's words name the pid, which would make every failure look new.
    error = f"killed by {match['rest'].strip().strip('()') or f'signal {-code}'}" if code < 0 else _exception_line(match["trace"])
    return FailureReport(exit_code=exit_codes.from_status(code), rank=int(match["rank"]), error=error)


def _exception_line(trace: str) -> str:
    """`ValueError: ...` of a printed traceback: the first unindented line after the last frame; its message may have more lines."""
    lines = trace.splitlines()
    frames = [index for index, line in enumerate(lines) if line.lstrip().startswith("File ")]
    if not frames:
        text = lines[0].strip() if lines else ""
        return "" if text.startswith("To enable traceback see") else text
    frame_indent = _indent(lines[frames[-1]])
    return next((line.strip() for line in lines[frames[-1] + 1 :] if line.strip() and _indent(line) < frame_indent), "")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
