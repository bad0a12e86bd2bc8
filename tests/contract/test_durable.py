"""Durable writes: the old content or the new one, never a mixture, whatever fails."""

import os
from pathlib import Path

import pytest

from supervise_hooks.contract import durable


@pytest.mark.parametrize("broken", ["fsync", "replace", "write"])
def test_a_failed_write_leaves_the_old_content_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """C39: whichever system call fails, rename included, the file keeps its old content and no temporary stays."""
    target = tmp_path / "state.json"
    durable.write(target, b"old")

    def fail(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space"):
        durable.write(target, b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_data_is_synced_before_its_name_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C24: fsync of the file, then the rename, then fsync of the folder: a name never reaches the disk before its data."""
    calls: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(fd: int) -> None:
        calls.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        real_fsync(fd)

    def replace(source: str, target: str) -> None:
        calls.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    durable.write(tmp_path / "x", [b"a", memoryview(b"b")])
    assert calls == ["sync file", "rename", "sync folder"]
    assert (tmp_path / "x").read_bytes() == b"ab"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that takes only part of the buffer is gone on with."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    durable.write(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_links_are_replaced_and_folders_made(tmp_path: Path) -> None:
    """`point` replaces an older link, `make_folder` makes what is missing and minds nothing that exists."""
    durable.make_folder(tmp_path / "a" / "b")
    durable.make_folder(tmp_path / "a" / "b")
    durable.point(tmp_path / "last", "a")
    durable.point(tmp_path / "last", "b")
    assert os.readlink(tmp_path / "last") == "b"
    assert sorted(os.listdir(tmp_path)) == ["a", "last"]
