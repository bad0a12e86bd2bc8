"""Runs under attack, cleared away even when the test fails."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kit.drill import Victim


@pytest.fixture
def make_victim() -> Iterator[Callable[..., Victim]]:
    """Makes a `Victim` that is gone after the test, with everything it started."""
    made: list[Victim] = []

    def make(*arguments: Any, **keywords: Any) -> Victim:
        made.append(Victim(*arguments, **keywords))
        return made[-1]

    yield make
    for victim in made:
        victim.clear()
