"""Manifests, receipts, messages and names: what is written can be read for ever, and nothing hostile can be."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervise_hooks.contract import identity, layout, messages
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.manifest import FileEntry, Manifest, encode, read_manifest

DATA = Path(__file__).parent.parent / "data"


def _manifest(**fields: object) -> dict[str, object]:
    base = {"run_id": "r", "attempt": 1, "step": 5, "world_size": 1, "reason": "periodic", "files": [], "sealed_at": 1.0}
    return base | fields


def _write(folder: Path, record: object) -> Path:
    (folder / layout.MANIFEST).write_text(json.dumps(record))
    return folder


def test_the_manifest_of_version_1_is_read_for_ever() -> None:
    """A manifest as version 1 wrote it, kept as it is."""
    manifest = read_manifest(DATA / "manifest-v1")
    assert (manifest.step, manifest.world_size, manifest.run_id, len(manifest.files)) == (1234, 2, "gpt-1f2e3d4c", 4)
    assert manifest.metric is not None
    assert manifest.metric.name == "val_loss"


def test_a_manifest_survives_its_round_trip_and_ignores_what_newer_versions_add(tmp_path: Path) -> None:
    """Encoding and reading give the same record; unknown fields are no error."""
    manifest = Manifest(
        run_id="r", attempt=2, step=7, world_size=1, reason="emergency", files=(FileEntry("a", 1, "00"),), sealed_at=3.5
    )
    (tmp_path / layout.MANIFEST).write_bytes(encode(manifest))
    assert read_manifest(tmp_path) == manifest
    _write(tmp_path, _manifest(invented_later=[1, 2]))
    assert read_manifest(tmp_path).step == 5


@pytest.mark.parametrize(
    "record",
    [
        _manifest(schema=99),
        _manifest(step=-1),
        _manifest(world_size=0),
        _manifest(reason="whim"),
        [],
        {"step": 1},
        *(
            _manifest(files=[{"path": path, "size": 1, "xxh3_128": "0"}])
            for path in ("/etc/passwd", "../x", "a/../b", "a\0b", "", "x" * 300, "a//b", ".")
        ),
    ],
)
def test_a_manifest_that_is_wrong_or_leads_outside_is_refused(tmp_path: Path, record: object) -> None:
    """C77: absolute paths, `..`, NUL, giant names and nonsense are one clear error."""
    with pytest.raises(ContractError, match="cannot"):
        read_manifest(_write(tmp_path, record))


def test_a_manifest_that_is_no_plain_file_of_sane_size_is_refused_unread(tmp_path: Path) -> None:
    """A link, a FIFO, a folder or a gigabyte of zeros neither hangs nor fills memory."""
    path = tmp_path / layout.MANIFEST
    for make in (lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path), path.mkdir):
        make()
        with pytest.raises(ContractError):
            read_manifest(tmp_path)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ContractError, match="too large"):
        read_manifest(tmp_path)


@given(st.binary(max_size=300))
def test_no_line_on_the_socket_raises_anything_but_a_contract_error(line: bytes) -> None:
    """Whatever bytes arrive, they are a message or a ContractError."""
    for decode in (messages.decode_from_rank, messages.decode_to_rank):
        try:
            decode(line)
        except ContractError:
            continue


@given(st.lists(st.binary(min_size=1, max_size=20).filter(lambda line: b"\n" not in line)), st.integers(1, 7))
def test_lines_come_out_as_they_went_in_however_they_are_cut(lines: list[bytes], cut: int) -> None:
    """LineBuffer gives back every line, whatever the sizes of the chunks."""
    stream = b"".join(line + b"\n" for line in lines)
    buffer = messages.LineBuffer()
    found = [line for start in range(0, len(stream), cut) for line in buffer.feed(stream[start : start + cut])]
    assert found == lines


def test_a_line_without_end_is_refused() -> None:
    """A peer that never sends a newline costs a bounded amount of memory."""
    buffer = messages.LineBuffer()
    with pytest.raises(ContractError, match="longer"):
        for _ in range(40):
            buffer.feed(b"x" * 65536)


def test_messages_of_a_newer_version_are_understood() -> None:
    """A field this version does not know is ignored."""
    line = msgspec.json.encode({"type": "StrayTerm", "signal": 15, "invented_later": True})
    assert messages.decode_from_rank(line) == messages.StrayTerm(signal=15)


@given(st.integers(0, 10**15), st.one_of(st.none(), st.integers(1, 9999)))
def test_step_names_are_parsed_back(step: int, attempt: int | None) -> None:
    """Every name we make is one we recognise."""
    assert layout.parse_step(layout.step_name(step, attempt)) == step


def test_a_pid_of_another_time_or_boot_is_another_process() -> None:
    """C79: identity is pid, start time and boot; a reused pid is a stranger."""
    me = identity.identify()
    assert identity.is_alive(me)
    assert not identity.is_alive(msgspec.structs.replace(me, start_ticks=me.start_ticks - 1))
    assert not identity.is_alive(msgspec.structs.replace(me, boot_id="earlier"))
    assert not identity.is_alive(msgspec.structs.replace(me, host="elsewhere"))
    with pytest.raises(ProcessLookupError):
        identity.identify(2**22 + 1)
