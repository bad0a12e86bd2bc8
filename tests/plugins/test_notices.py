"""Notice sources that poll."""

import os
from pathlib import Path

import pytest

from supervise_daemon.notices.file import FileNotice, parse_grace


def test_a_new_file_is_one_notice_with_its_grace(tmp_path: Path) -> None:
    """Said once while it stays; removing it arms the source again."""
    path = tmp_path / "notice"
    source = FileNotice(path, grace_s=30)
    assert source.poll() is None
    path.write_text("120\n")
    notice = source.poll()
    assert notice is not None
    assert (notice.action, notice.grace_s, str(path) in notice.source) == ("preempt", 120, True)
    assert source.poll() is None
    path.unlink()
    assert source.poll() is None
    path.touch()
    again = source.poll()
    assert again is not None
    assert again.grace_s == 30


def test_a_file_from_before_is_no_notice_until_written_again(tmp_path: Path) -> None:
    """A leftover of an earlier machine must not end this attempt before it begins."""
    path = tmp_path / "notice"
    path.touch()
    source = FileNotice(path, grace_s=30)
    assert source.poll() is None
    os.utime(path, (1, 1))
    assert source.poll() is not None


def test_odd_files_never_raise(tmp_path: Path) -> None:
    """A folder or garbage in place of the file is still somebody's notice."""
    path = tmp_path / "notice"
    source = FileNotice(path, grace_s=30)
    path.mkdir()
    folder = source.poll()
    assert folder is not None
    assert folder.grace_s == 30
    path.rmdir()
    assert source.poll() is None
    path.write_bytes(b"\xff\x00" * 4096)
    garbage = source.poll()
    assert garbage is not None
    assert garbage.grace_s == 30


def test_a_fifo_in_its_place_does_not_hang_the_loop(tmp_path: Path) -> None:
    """Opening a FIFO for reading waits for a writer: polling must not."""
    path = tmp_path / "notice"
    source = FileNotice(path, grace_s=30)
    os.mkfifo(path)
    notice = source.poll()
    assert notice is not None
    assert notice.grace_s == 30


@pytest.mark.parametrize(
    "line, seconds",
    [("", 30), ("90", 90), (" 90 s\n", 90), ("1.5", 1.5), ("soon", 30), ("-5", 30), ("99999999", 30), ("5 minutes", 30)],
)
def test_grace_named_by_the_first_line(line: str, seconds: float) -> None:
    """A number of seconds, else the run's own grace."""
    assert parse_grace(line, 30) == seconds
