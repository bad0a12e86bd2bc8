"""Sealing: one manifest when, and only when, all receipts of one save are there."""

import os
from pathlib import Path

import msgspec
import pytest

from kit.checkpoints import Saved, a_checkpoint, parts, payload, read
from supervise_hooks.contract import layout
from supervise_hooks.contract.errors import CheckpointError, ContractError
from supervise_hooks.contract.manifest import read_receipt
from supervise_hooks.contract.sealing import join, seal
from supervise_hooks.contract.verification import verify_sealed


def _edit_receipt(folder: Path, rank: int, world_size: int, changes: dict[str, object]) -> None:
    path = folder / layout.receipt_name(rank, world_size)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | changes))


def _stays_unsealed(folder: Path) -> str:
    manifest, reason = seal(folder)
    assert manifest is None
    assert not (folder / layout.MANIFEST).exists()
    return reason


def test_all_receipts_make_one_manifest_in_order_of_rank(tmp_path: Path) -> None:
    """The manifest names every file of every rank, and what it describes is whole."""
    folder = parts(tmp_path, 12, range(3), Saved(world_size=3, attempt=2, reason="emergency"))
    manifest, reason = seal(folder, now=5.0)
    assert manifest == read(folder)
    assert (manifest.step, manifest.attempt, manifest.world_size, manifest.reason, manifest.sealed_at) == (
        12,
        2,
        3,
        "emergency",
        5.0,
    )
    assert [entry.path for entry in manifest.files] == [
        name(rank, 3) for rank in range(3) for name in (layout.tensors_name, layout.state_name)
    ]
    assert "3 receipts" in reason
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    """Whoever comes second gets the first one's manifest, byte for byte on disk."""
    folder = a_checkpoint(tmp_path, 1)
    before = (folder / layout.MANIFEST).read_bytes()
    manifest, reason = seal(folder, now=99.0)
    assert manifest is not None
    assert (manifest.sealed_at, reason) == (0.0, "already sealed")
    assert (folder / layout.MANIFEST).read_bytes() == before


@pytest.mark.parametrize("written", [range(0), range(1), range(1, 3), range(2)])
def test_a_missing_receipt_is_named_and_nothing_is_sealed(tmp_path: Path, written: range) -> None:
    """C25: with any rank's receipt missing there is no manifest, and the reason names the rank."""
    folder = parts(tmp_path, 5, written, Saved(world_size=3))
    reason = _stays_unsealed(folder)
    first_missing = min(set(range(3)) - set(written))
    assert (f"rank {first_missing}" in reason) if written else (reason == "no rank has written a receipt")


def test_receipts_of_two_attempts_are_never_joined(tmp_path: Path) -> None:
    """C21: rank 0 of attempt 1 beside rank 1 of attempt 2: different states, no checkpoint."""
    folder = parts(tmp_path, 5, range(1), Saved(attempt=1))
    parts(tmp_path, 5, range(1, 2), Saved(attempt=2))
    assert "1 of 2 receipts of attempt 2 are missing: rank 0" in _stays_unsealed(folder)
    parts(tmp_path, 5, range(1), Saved(attempt=2))
    manifest, _ = seal(folder)
    assert manifest is not None
    assert manifest.attempt == 2


def test_receipts_of_two_runs_are_never_joined(tmp_path: Path) -> None:
    """C69: another run's receipt of the same attempt number does not fill the gap."""
    folder = parts(tmp_path, 5, range(1), Saved(run_id="mine"))
    parts(tmp_path, 5, range(1, 2), Saved(run_id="theirs"))
    assert "missing" in _stays_unsealed(folder)


def test_debris_of_another_world_size_is_left_out(tmp_path: Path) -> None:
    """C27: beside a killed save of four ranks, one receipt damaged, the two ranks of today are sealed, alone."""
    saved = Saved(world_size=4, attempt=1)
    folder = parts(tmp_path, 5, range(3), saved)
    (folder / layout.receipt_name(2, 4)).write_bytes(b"{")
    parts(tmp_path, 5, range(2), Saved(world_size=2, attempt=2))
    manifest, reason = seal(folder)
    assert manifest is not None, reason
    assert {entry.path for entry in manifest.files} == {
        name(rank, 2) for rank in range(2) for name in (layout.tensors_name, layout.state_name)
    }
    assert verify_sealed(folder, "full")[0].verdict == "WHOLE"


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 200, b"[]", b'{"schema": 99}'])
def test_a_damaged_receipt_of_this_world_is_no_receipt(tmp_path: Path, content: bytes) -> None:
    """C24: a receipt that cannot be read vouches for nothing, and is named."""
    folder = parts(tmp_path, 5, range(2))
    (folder / layout.receipt_name(1, 2)).write_bytes(content)
    assert "rank-00001-of-00002.receipt.json" in _stays_unsealed(folder)


@pytest.mark.parametrize("change", ["cut", "grown", "gone"])
def test_a_file_that_is_not_as_its_receipt_says_is_not_sealed(tmp_path: Path, change: str) -> None:
    """C22: receipts are only believed where the files have their sizes."""
    folder = parts(tmp_path, 5, range(2))
    size = payload(folder).stat().st_size
    {
        "cut": lambda: os.truncate(payload(folder), size - 1),
        "grown": lambda: os.truncate(payload(folder), size + 1),
        "gone": payload(folder).unlink,
    }[change]()
    assert "rank-00000-of-00002.safetensors" in _stays_unsealed(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": [{"path": "/etc/passwd", "size": 1, "xxh3_128": "0"}]},
        {"files": [{"path": "../x", "size": 1, "xxh3_128": "0"}]},
        {"files": [{"path": "a\0b", "size": 1, "xxh3_128": "0"}]},
        {"files": [{"path": "x" * 5000, "size": 1, "xxh3_128": "0"}]},
        {"files": [{"path": "a", "size": -1, "xxh3_128": "0"}]},
        {"rank": 0},
        {"rank": 7},
        {"world_size": 10**12},
        {"world_size": 3},
        {"step": -5},
    ],
)
def test_a_receipt_that_lies_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """C77: a receipt that leads outside, or is not of the rank its name says, is an error before anything follows it."""
    folder = parts(tmp_path, 5, range(2))
    _edit_receipt(folder, 1, 2, changes)
    with pytest.raises(ContractError, match="cannot use"):
        read_receipt(folder, 1, 2)
    assert "cannot use" in _stays_unsealed(folder)


def test_a_damaged_manifest_is_left_alone_without_an_exception(tmp_path: Path) -> None:
    """C60: sealing over a damaged manifest would hide the damage; asking for it is no error either."""
    folder = a_checkpoint(tmp_path, 5)
    os.truncate(folder / layout.MANIFEST, 40)
    manifest, reason = seal(folder)
    assert manifest is None
    assert "not a manifest" in reason
    assert (folder / layout.MANIFEST).stat().st_size == 40


def test_a_disk_that_refuses_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C68: no space for the manifest is a CheckpointError that names the folder; no half manifest stays."""
    folder = parts(tmp_path, 5, range(2))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"cannot seal .*No space"):
        seal(folder)
    monkeypatch.undo()
    assert not [name for name in os.listdir(folder) if name.startswith((".tmp", layout.MANIFEST))]
    assert seal(folder)[0] is not None


def test_joining_what_does_not_belong_together_is_an_error(tmp_path: Path) -> None:
    """Receipts of two steps never make one manifest, whoever calls."""
    one, other = (read_receipt(parts(tmp_path, step, range(1), Saved(world_size=1)), 0, 1) for step in (5, 6))
    with pytest.raises(ContractError, match="cannot join"):
        join([one, other], 0.0)
