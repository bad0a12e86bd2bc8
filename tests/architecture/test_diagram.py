"""The state diagram in supervisor/README.md is the machine's own."""

import os

from architecture import diagram
from supervise_daemon.core import events, machine
from supervise_daemon.core.job import Phase


def test_the_diagram_in_the_readme_is_current() -> None:
    """supervisor/README.md shows what the explorer saw; `UPDATE_DIAGRAM=1 make test ARGS=tests/architecture/test_diagram.py` redraws it."""
    current = diagram.draw(diagram.seen())
    text = diagram.README.read_text()
    if os.environ.get("UPDATE_DIAGRAM") == "1" and diagram.drawn(text) != current:
        diagram.README.write_text(diagram.redraw(text, current))
        text = diagram.README.read_text()
    assert diagram.drawn(text) == current, "run: UPDATE_DIAGRAM=1 make test ARGS=tests/architecture/test_diagram.py"


def test_every_arrow_is_a_row_of_the_table() -> None:
    """The explorer goes through the machine's table, so nothing can be drawn that is not in it; and every phase is drawn."""
    kinds = {kind.__name__: kind for kind in events.Event.__subclasses__()}
    edges = diagram.seen()
    for before, event, _ in edges:
        kind = kinds.get(event, events.TimerFired if event.endswith(" timer") else events.NoticeArrived)
        assert (before, kind) in machine.TABLE
    assert {before for before, _, _ in edges} | {after for _, _, after in edges} == set(Phase)


def test_a_new_arrow_changes_the_diagram() -> None:
    """A changed machine makes the test above fail."""
    edges = diagram.seen()
    assert diagram.draw({*edges, (Phase.KILLING, "Begun", Phase.WAITING)}) != diagram.draw(edges)
    assert diagram.redraw(f"a\n{diagram.BEGIN}\nold\n{diagram.END}\nb\n", "new") == f"a\n{diagram.BEGIN}\nnew\n{diagram.END}\nb\n"
