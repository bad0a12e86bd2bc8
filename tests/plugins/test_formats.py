"""Each checkpoint format against the ways in which files break."""

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.checkpoints import Saved, a_checkpoint, edit_manifest, mark_writing, parts, payload, read, tensor_bytes
from supervise_daemon.formats.registry import FORMATS, formats, recognise
from supervise_daemon.formats.safetensors_file import SafetensorsFormat
from supervise_daemon.formats.sealed import FOREIGN_WRITER_S, SealedFormat, read_unsealed
from supervise_daemon.formats.torch_file import TorchFileFormat
from supervise_hooks.contract import layout
from supervise_hooks.contract.identity import identify
from supervise_hooks.contract.verification import Inspection

Damage = Callable[[Path], object]


def quick(path: Path) -> Inspection:
    """A quick look at a sealed checkpoint."""
    return SealedFormat().inspect(path, "quick")


def full(path: Path) -> Inspection:
    """Full proof of a sealed checkpoint."""
    return SealedFormat().inspect(path, "full")


def zero(path: Path, begin: int, count: int) -> None:
    """Zeros in the middle; size and times kept."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(count))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


# sealed


def test_a_whole_checkpoint_is_whole_at_both_depths(tmp_path: Path) -> None:
    """The format, step and depth are told with the verdict."""
    folder = a_checkpoint(tmp_path, 20)
    for depth, inspection in (("quick", quick(folder)), ("full", full(folder))):
        told = (inspection.verdict, inspection.step, inspection.depth, inspection.problems, inspection.format)
        assert told == ("WHOLE", 20, depth, (), "supervise-sealed")


def cut(count: int) -> Damage:
    """Cut a rank's tensor file to `count` bytes (negative: from its end)."""
    return lambda folder: os.truncate(payload(folder), count if count >= 0 else payload(folder).stat().st_size + count)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (cut(0), "rank-00000-of-00002.safetensors"),
        (cut(100), "rank-00000-of-00002.safetensors"),
        (cut(-8), "rank-00000-of-00002.safetensors"),
        (
            lambda folder: payload(folder).write_bytes(payload(folder).read_bytes() + bytes(512)),
            "rank-00000-of-00002.safetensors",
        ),
        (lambda folder: payload(folder, rank=1).unlink(), "rank-00001-of-00002.safetensors is missing"),
        (lambda folder: os.truncate(payload(folder, rank=1), 0), "rank-00001-of-00002.safetensors has 0 bytes"),
        (lambda folder: (payload(folder).unlink(), payload(folder).mkdir()), "not a regular file"),
        (lambda folder: (payload(folder).unlink(), os.mkfifo(payload(folder))), "not a regular file"),
        (lambda folder: (payload(folder).rename(folder / "x"), payload(folder).symlink_to("x")), "not a regular file"),
        (lambda folder: os.truncate(folder / layout.MANIFEST, 50), "not a manifest"),
        (lambda folder: ((folder / layout.MANIFEST).unlink(), (folder / layout.MANIFEST).mkdir()), "not a regular file"),
        (lambda folder: ((folder / layout.MANIFEST).unlink(), os.mkfifo(folder / layout.MANIFEST)), "not a regular file"),
        (lambda folder: (folder / layout.MANIFEST).write_bytes(b""), "not a manifest"),
        (lambda folder: zero(folder / layout.MANIFEST, 0, (folder / layout.MANIFEST).stat().st_size), "not a manifest"),
    ],
)
def test_damage_to_sizes_and_presence_is_seen_without_reading_data(tmp_path: Path, damage: Damage, named: str) -> None:
    """C22, C23: cut, grown, missing, empty, no file at all, torn manifest: torn on a quick look, naming the file."""
    folder = a_checkpoint(tmp_path, 20)
    damage(folder)
    inspection = quick(folder)
    assert inspection.verdict == "TORN"
    assert named in " ".join(inspection.problems)


def test_zeros_of_the_right_size_are_found_by_full_proof_only(tmp_path: Path) -> None:
    """C24: rename reached the disk before the data. Size, times and header are right; the digest is not."""
    folder = a_checkpoint(tmp_path, 20)
    zero(payload(folder), payload(folder).stat().st_size - 64, 64)
    assert quick(folder).verdict == "WHOLE"
    inspection = full(folder)
    assert inspection.verdict == "TORN"
    assert "other content than was saved" in inspection.problems[0]


def test_every_single_flipped_bit_is_found(tmp_path: Path) -> None:
    """One bit anywhere in any file of the manifest, and the checkpoint is torn."""
    folder = a_checkpoint(tmp_path, 20)
    for entry in read(folder).files:
        path = folder / entry.path
        whole = path.read_bytes()
        for position in range(0, len(whole), 37):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << position % 8
            path.write_bytes(flipped)
            assert full(folder).verdict == "TORN", (entry.path, position)
        path.write_bytes(whole)
    assert full(folder).verdict == "WHOLE"


@pytest.mark.parametrize("world", [None, "1", "4"])
def test_the_expected_ranks_come_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: str | None) -> None:
    """C27: whoever looks, with whatever WORLD_SIZE, gets the same answer, and a missing rank is missing for all."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    folder = a_checkpoint(tmp_path, 20)
    assert full(folder).verdict == "WHOLE"
    payload(folder, rank=1).unlink()
    assert full(folder).verdict == "TORN"


def test_a_manifest_that_forgets_a_rank_is_torn(tmp_path: Path) -> None:
    """C25: every declared part must be there, even if the list of files agrees with the disk."""
    folder = a_checkpoint(tmp_path, 20)
    raw = [{"path": e.path, "size": e.size, "xxh3_128": e.xxh3_128} for e in read(folder).files if "rank-00000" in e.path]
    edit_manifest(folder, files=raw)
    assert "rank 1 of 2 has no files" in quick(folder).problems[0]


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "x\0y", "a" * 5000, "", "a//b", "."])
def test_names_that_lead_outside_are_refused_unopened(tmp_path: Path, name: str) -> None:
    """C77: a manifest from a stranger names files elsewhere: torn, and nothing outside is opened."""
    folder = a_checkpoint(tmp_path, 20)
    edit_manifest(folder, files=[{"path": name, "size": 1, "xxh3_128": "0"}])
    inspection = full(folder)
    assert inspection.verdict == "TORN"
    assert "outside the checkpoint" in inspection.problems[0]


def test_a_linked_folder_inside_does_not_lead_outside(tmp_path: Path) -> None:
    """C77: `sub/file` is refused where `sub` is a link out of the checkpoint."""
    folder = a_checkpoint(tmp_path, 20)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"x")
    (folder / "sub").symlink_to(outside)
    edit_manifest(folder, files=[{"path": "sub/file", "size": 1, "xxh3_128": "0"}])
    assert quick(folder).problems == ("sub/file lies behind a link",)


@pytest.mark.parametrize(
    "changes", [{"world_size": 10**12}, {"world_size": -1}, {"step": -5}, {"schema": 99}, {"files": "x"}, {"step": "x"}]
)
def test_absurd_numbers_in_a_manifest_are_torn_at_once(tmp_path: Path, changes: dict[str, object]) -> None:
    """C77: a world of 10^12 ranks costs neither memory nor time, nonsense is no exception."""
    folder = a_checkpoint(tmp_path, 20)
    edit_manifest(folder, **changes)
    inspection = full(folder)
    assert inspection.verdict == "TORN"
    assert len(inspection.problems) < 20


def test_a_manifest_too_large_is_not_read(tmp_path: Path) -> None:
    """C77: a sparse gigabyte under the manifest's name is refused by its size."""
    folder = a_checkpoint(tmp_path, 20)
    os.truncate(folder / layout.MANIFEST, 1 << 30)
    assert "too large" in quick(folder).problems[0]


# being written, or left behind


def test_a_live_writer_is_told_apart_from_a_dead_one(tmp_path: Path) -> None:
    """C26: "being written" is not "broken"; the mark of a process that is gone counts for nothing."""
    folder = parts(tmp_path, 20, range(1))
    mark = mark_writing(folder, 1, 2, identify())
    assert read_unsealed(folder, now=0.0).state == "writing"
    assert "being written by rank 1" in quick(folder).problems[0]
    me = identify()
    mark_writing(folder, 1, 2, type(me)(me.pid, me.start_ticks + 1, me.boot_id, me.host))  # our pid, given to another process
    gone = read_unsealed(folder, now=mark.stat().st_mtime)
    assert (gone.state, gone.run_id) == ("unfinished", "run-1")
    assert "1 of 2 ranks finished writing, and no writer is left" in gone.problem


@pytest.mark.parametrize(("age_s", "state"), [(1.0, "writing"), (FOREIGN_WRITER_S + 1, "unfinished")])
def test_a_writer_on_another_host_counts_by_the_age_of_its_mark(tmp_path: Path, age_s: float, state: str) -> None:
    """Its processes cannot be seen from here: ten minutes after the last sign it is taken for gone."""
    me = identify()
    mark = mark_writing(tmp_path / "step-000000020", 0, 2, type(me)(me.pid, me.start_ticks, me.boot_id, "elsewhere"))
    assert read_unsealed(mark.parent, now=mark.stat().st_mtime + age_s).state == state


def test_debris_that_hangs_or_lies_is_survived(tmp_path: Path) -> None:
    """A pipe, a folder, a link and garbage under the names of marks and receipts: read at once, and nobody's."""
    folder = tmp_path / "step-000000020"
    folder.mkdir()
    os.mkfifo(folder / layout.writing_name(0, 4))
    os.mkfifo(folder / layout.receipt_name(0, 4))
    (folder / layout.writing_name(1, 4)).mkdir()
    (folder / layout.receipt_name(1, 4)).write_bytes(b"\xff{{{")
    (folder / layout.receipt_name(2, 4)).symlink_to("/etc/passwd")
    found = read_unsealed(folder, now=0.0)
    assert (found.state, found.run_id) == ("unfinished", None)
    assert "0 of 4 ranks" in found.problem
    assert quick(folder).verdict == "TORN"


# torch.save files


class Bomb:
    """Runs a command when unpickled."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.touched),)


def torch_zip(path: Path, pickled: bytes = b"\x80\x02}.", compression: int = zipfile.ZIP_STORED) -> Path:
    """A file laid out as torch.save lays it out."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in (("data.pkl", pickled), ("data/0", bytes(range(256)) * 16), ("version", b"3\n")):
            archive.writestr(f"{path.stem}/{name}", content)
    return path


def test_a_torch_file_is_proved_by_its_checksums(tmp_path: Path) -> None:
    """Full reads every record; quick says what it did not look at."""
    path = torch_zip(tmp_path / "model_step_120.pt")
    seen: list[int] = []
    inspection = TorchFileFormat().inspect(path, "full", seen.append)
    assert (inspection.verdict, inspection.step, inspection.caveats) == ("WHOLE", 120, ())
    assert sum(seen) > 4096
    assert "checksums were not read" in TorchFileFormat().inspect(path, "quick").caveats[0]


def test_a_flipped_byte_in_a_torch_file_is_found(tmp_path: Path) -> None:
    """torch.load would not notice (it ignores CRCs); a full look does."""
    path = torch_zip(tmp_path / "model.pt")
    content = bytearray(path.read_bytes())
    content[content.index(bytes(range(256))) + 100] ^= 1
    path.write_bytes(content)
    assert TorchFileFormat().inspect(path, "quick").verdict == "WHOLE"
    inspection = TorchFileFormat().inspect(path, "full")
    assert (inspection.verdict, "data/0" in inspection.problems[0]) == ("TORN", True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: path.write_bytes(path.read_bytes() + bytes(512)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: torch_zip(path, compression=zipfile.ZIP_DEFLATED),
    ],
)
def test_damaged_torch_files_are_torn_on_a_quick_look(tmp_path: Path, damage: Damage) -> None:
    """C22: empty, cut, grown, zeroed; and compressed records, which torch never writes and which could unpack without end."""
    path = torch_zip(tmp_path / "model.pt")
    damage(path)
    assert TorchFileFormat().inspect(path, "quick").verdict == "TORN"


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin"])
def test_looking_never_unpickles(tmp_path: Path, suffix: str) -> None:
    """C76: a pickle that makes a folder when loaded, inside a zip and as a bare legacy file: looked at fully, nothing is made."""
    touched = tmp_path / "touched"
    bomb = pickle.dumps(Bomb(touched))
    inside = torch_zip(tmp_path / f"zip{suffix}", bomb)
    legacy = tmp_path / f"legacy{suffix}"
    legacy.write_bytes(bomb)
    assert TorchFileFormat().inspect(inside, "full").verdict == "WHOLE"
    inspection = TorchFileFormat().inspect(legacy, "full")
    assert (inspection.verdict, "legacy pickle" in inspection.caveats[0]) == ("UNKNOWN", True)
    assert not touched.exists()
    pickle.loads(bomb)  # noqa: S301  the bomb does go off when somebody unpickles it
    assert touched.exists()


def test_a_file_saved_without_checksums_is_whole_with_a_caveat(tmp_path: Path) -> None:
    """torch.serialization.set_crc32_options(False) writes 0 for every CRC: not damage, but nothing proved."""
    path = torch_zip(tmp_path / "model.pt")
    with zipfile.ZipFile(path) as archive:
        crcs = {record.CRC for record in archive.infolist()}
    content = path.read_bytes()
    for crc in crcs:
        content = content.replace(struct.pack("<I", crc), bytes(4))
    path.write_bytes(content)
    inspection = TorchFileFormat().inspect(path, "full")
    assert (inspection.verdict, "without checksums" in inspection.caveats[0]) == ("WHOLE", True)


@pytest.mark.torch
def test_what_torch_really_writes_is_whole(tmp_path: Path) -> None:
    """Real files: with checksums, without, and legacy."""
    torch = pytest.importorskip("torch")
    state = {"w": torch.randn(1000), "b": torch.zeros(3), "names": ["a"]}
    path = tmp_path / "epoch=3-step=40.ckpt"
    torch.save(state, path)
    whole = TorchFileFormat().inspect(path, "full")
    assert (whole.verdict, whole.step, whole.problems, whole.caveats) == ("WHOLE", 40, (), ())
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert "without checksums" in TorchFileFormat().inspect(path, "full").caveats[0]
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert TorchFileFormat().inspect(path, "full").verdict == "UNKNOWN"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_makes_inspection_raise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any cut and any overwritten bytes, in each format: a verdict, never an exception."""
    base = tmp_path_factory.mktemp("fuzz")
    path = data.draw(st.sampled_from([torch_zip(base / "m.pt"), base / "m.safetensors"]))
    if path.suffix == ".safetensors":
        path.write_bytes(tensor_bytes(1, 0, 1))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=12))
        content[begin : begin + len(patch)] = patch
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    form = recognise(path)
    assert form is not None
    for depth in ("quick", "full"):
        assert form.inspect(path, depth).verdict in ("WHOLE", "TORN", "UNKNOWN")  # type: ignore[arg-type]


# safetensors files


def test_safetensors_is_whole_by_its_header_and_says_what_that_leaves_open(tmp_path: Path) -> None:
    """No checksum in this format: the caveat is always there, and a full look reads every byte."""
    path = tmp_path / "model-7.safetensors"
    path.write_bytes(tensor_bytes(7, 0, 1))
    seen: list[int] = []
    inspection = SafetensorsFormat().inspect(path, "full", seen.append)
    assert (inspection.verdict, inspection.step) == ("WHOLE", 7)
    assert "no checksum" in inspection.caveats[0]
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, 1])
def test_safetensors_that_its_header_does_not_cover_is_torn(tmp_path: Path, size: int) -> None:
    """C22: cut anywhere, or grown by one byte (`size` 1)."""
    path = tmp_path / "model.safetensors"
    whole = tensor_bytes(7, 0, 1)
    path.write_bytes(whole + b"\0" if size == 1 else whole[:size])
    inspection = SafetensorsFormat().inspect(path, "quick")
    assert inspection.verdict == "TORN"
    assert "model.safetensors" in inspection.problems[0]


# the family


def test_the_registry_knows_each_format_by_its_own_name() -> None:
    """A row's key is the name in `verify --json`."""
    assert [form.name for form in formats()] == list(FORMATS)


@pytest.mark.parametrize("name", ["notes.txt", "README", "x.pt/", "model.json"])
def test_what_is_no_checkpoint_is_not_recognised(tmp_path: Path, name: str) -> None:
    """Files of other kinds, and folders with a file's ending."""
    path = tmp_path / name
    path.mkdir() if name.endswith("/") else path.write_bytes(b"x")
    assert recognise(path) is None


def test_a_renamed_sealed_checkpoint_is_still_one(tmp_path: Path) -> None:
    """By its manifest, with the manifest's step."""
    folder = a_checkpoint(tmp_path, 20, Saved(name="best-so-far-99"))
    form = recognise(folder)
    assert form is not None
    assert form.inspect(folder, "quick").step == 20
