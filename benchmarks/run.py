"""`make bench`: run every benchmark, print the table, write results.json."""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from measure import Result, conditions

BENCHMARKS = ("hook_cost", "daemon", "notice", "flush", "verify")


def main() -> int:
    """Exit code 0 unless a benchmark could not run; a missed budget is a figure, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"which ({', '.join(BENCHMARKS)}); default: all")
    parser.add_argument("--folder", type=Path, help="where files are written; default: a temporary folder on this disk")
    args = parser.parse_args()
    unknown = set(args.only) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; choose from {', '.join(BENCHMARKS)}")
    console = Console()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="supervise-bench-", dir=args.folder or Path(__file__).parent) as folder:
        where = conditions(Path(folder).resolve())
        for name in args.only or BENCHMARKS:
            console.print(f"running {name} …", style="dim")
            results += importlib.import_module(name).measure(Path(folder))
    table = Table(title="more is better; budgets of the design", box=None, header_style="bold")
    for title in ("benchmark", "ratio", "target", "", "measured"):
        table.add_column(title)
    for result in results:
        mark = "[green]pass" if result.passed else "[red]miss"
        table.add_row(result.name, f"{result.ratio:.2f}", f"{result.target:.2f}", mark, result.measured)
    console.print(table)
    rows = [
        {
            "name": result.name,
            "ratio": round(result.ratio, 4),
            "target": result.target,
            "pass": result.passed,
            "measured": result.measured,
            "conditions": where | result.conditions,
        }
        for result in results
    ]
    (Path(__file__).parent / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
