"""A folder with a `supervise` of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.supervised import Supervised


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Supervised]:
    """A folder for one run."""
    supervised = Supervised(tmp_path)
    yield supervised
    supervised.close()
