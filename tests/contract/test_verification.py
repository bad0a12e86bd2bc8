"""What `plugins/test_formats.py` does not show of verification: files kept from version 1, and hostile or linked folders."""

import os
import shutil
import time
from pathlib import Path

import msgspec

from kit.checkpoints import a_checkpoint
from supervise_hooks.contract import digests, layout
from supervise_hooks.contract.manifest import FileEntry, Manifest, encode, read_manifest, read_receipt
from supervise_hooks.contract.sealing import seal
from supervise_hooks.contract.verification import verify_sealed

DATA = Path(__file__).parent.parent / "data"


def test_a_checkpoint_of_version_1_is_whole_for_ever() -> None:
    """A whole sealed checkpoint as version 1 wrote it: its manifest and receipts load, every byte is proved."""
    inspection, manifest = verify_sealed(DATA / "sealed-v1", "full")
    assert (inspection.verdict, inspection.step, inspection.problems) == ("WHOLE", 1234, ())
    assert manifest == read_manifest(DATA / "sealed-v1")
    receipts = [read_receipt(DATA / "sealed-v1", rank, 2) for rank in range(2)]
    assert {(r.run_id, r.attempt, r.step, r.reason) for r in receipts} == {("gpt-1f2e3d4c", 3, 1234, "emergency")}
    assert [entry for receipt in receipts for entry in receipt.files] == list(manifest.files)


def test_receipts_of_version_1_can_still_be_sealed(tmp_path: Path) -> None:
    """A save interrupted before its manifest, sealed by this version after an upgrade, says what version 1 said."""
    folder = shutil.copytree(DATA / "sealed-v1", tmp_path / layout.step_name(1234))
    (folder / layout.MANIFEST).unlink()
    manifest, reason = seal(folder, now=1796019198.6)
    assert manifest == read_manifest(DATA / "sealed-v1"), reason


def test_a_million_files_that_are_not_there_cost_bounded_time_and_words(tmp_path: Path) -> None:
    """C77: a manifest of 10^6 names is torn in seconds and a thousand problems, not in minutes and a million."""
    entry = '{"path":"sub/file-%07d","size":1,"xxh3_128":"0"}'
    head = '{"run_id":"r","attempt":1,"step":5,"world_size":1,"reason":"periodic","sealed_at":1,"files":['
    (tmp_path / layout.MANIFEST).write_text(head + ",".join(entry % number for number in range(10**6)) + "]}")
    began = time.process_time()
    inspection, _ = verify_sealed(tmp_path, "full")
    assert time.process_time() - began < 10
    assert inspection.verdict == "TORN"
    assert len(inspection.problems) == 1001
    assert "not looked at" in inspection.problems[-1]


def _foreign(folder: Path) -> Path:
    """A sealed checkpoint with its one file in a sub-folder, as another library may lay it out."""
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights.bin").write_bytes(b"12345")
    files = (FileEntry("sub/weights.bin", 5, digests.digest_buffers([b"12345"])),)
    manifest = Manifest(run_id="r", attempt=1, step=7, world_size=2, reason="external", files=files, sealed_at=1.0)
    (folder / layout.MANIFEST).write_bytes(encode(manifest))
    return folder


def test_a_checkpoint_behind_a_link_is_whole_and_a_link_inside_it_is_not(tmp_path: Path) -> None:
    """C70, C77: the user's own link to a checkpoint is followed, sub-folders and all; a linked sub-folder is refused."""
    folder = _foreign(tmp_path / "elsewhere" / "run")
    (tmp_path / "step-000000007").symlink_to("elsewhere/run")
    assert verify_sealed(tmp_path / "step-000000007", "full")[0].verdict == "WHOLE"
    (folder / "sub").rename(tmp_path / "sub")
    (folder / "sub").symlink_to(tmp_path / "sub")
    inspection, _ = verify_sealed(tmp_path / "step-000000007", "full")
    assert inspection.problems == ("sub/weights.bin lies behind a link",)


def test_a_flipped_bit_and_a_lost_file_are_both_told(tmp_path: Path) -> None:
    """C22, C24: one file is gone and another has a flipped bit: full proof names both, quick only what it can see."""
    folder = a_checkpoint(tmp_path, 3)
    (folder / layout.state_name(0, 2)).unlink()
    damaged = folder / layout.state_name(1, 2)
    content = bytearray(damaged.read_bytes())
    content[3] ^= 1
    damaged.write_bytes(content)
    quick, full = (verify_sealed(folder, depth)[0] for depth in ("quick", "full"))  # type: ignore[arg-type]
    assert [problem.split()[0] for problem in quick.problems] == [layout.state_name(0, 2)]
    assert sorted(problem.split()[0] for problem in full.problems) == [layout.state_name(0, 2), layout.state_name(1, 2)]


def test_progress_counts_every_byte_of_a_full_proof(tmp_path: Path) -> None:
    """`on_bytes` adds up to the size of the checkpoint; a quick look reads no data."""
    folder = a_checkpoint(tmp_path, 3)
    for depth, expected in (("full", msgspec.json.decode((folder / layout.MANIFEST).read_bytes())["files"]), ("quick", [])):
        read: list[int] = []
        verify_sealed(folder, depth, read.append)  # type: ignore[arg-type]
        assert sum(read) == sum(entry["size"] for entry in expected)


def test_looking_writes_nothing(tmp_path: Path) -> None:
    """A checkpoint on read-only storage is proved all the same: no file, no time stamp changes."""
    folder = a_checkpoint(tmp_path, 3)
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)}
    verify_sealed(folder, "full")
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)} == before
