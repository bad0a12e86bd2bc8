"""The state diagram of supervisor/README.md, drawn from what the explorer saw the machine do."""

from collections.abc import Iterable
from pathlib import Path

from kit.explorer import Edge
from kit.worlds import WORLDS, walk
from supervise_daemon.core.job import Phase

README = Path(__file__).parents[2] / "supervisor" / "README.md"
BEGIN, END = "<!-- diagram: begin -->", "<!-- diagram: end -->"


def draw(edges: Iterable[Edge]) -> str:
    """A mermaid diagram: one arrow for each pair of phases, labelled with every event that leads over it."""
    labels: dict[tuple[Phase, Phase], set[str]] = {}
    for before, event, after in edges:
        labels.setdefault((before, after), set()).add(event)
    order = list(Phase)
    arrows = sorted(labels, key=lambda pair: (order.index(pair[0]), order.index(pair[1])))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.WAITING}: Begun"]
    lines += [f"    {before} --> {after}: {', '.join(sorted(labels[before, after]))}" for before, after in arrows]
    lines += [f"    {Phase.ENDED} --> [*]", "```"]
    return "\n".join(lines)


def seen() -> set[Edge]:
    """Every change of phase in any of the explorer's worlds."""
    return {edge for name in WORLDS for edge in walk(name).edges}


def drawn(text: str) -> str:
    """The diagram in a page."""
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def redraw(text: str, diagram: str) -> str:
    """The page with this diagram."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"cannot put the diagram into {README}: the lines {BEGIN} and {END} are not there")
    return f"{before}{begin}\n{diagram}\n{end}{after}"
