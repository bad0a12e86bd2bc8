"""Tensor file headers: what we write we read, and no header, however broken, is accepted or hangs."""

import math
import struct
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supervise_hooks.contract import tensors
from supervise_hooks.contract.errors import ContractError
from supervise_hooks.contract.tensors import Entry, Header, Piece, check_coverage, encode_header, parse_header, read_header

_shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def _files(draw: st.DrawFn) -> tuple[dict[str, Entry], dict[str, Piece], int]:
    """(entries, pieces, data bytes) of a file as ours are."""
    entries: dict[str, Entry] = {}
    position = 0
    for key in draw(st.lists(st.text(max_size=8).filter(lambda key: key != "__metadata__"), max_size=5, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(tensors.DTYPE_BITS))), draw(_shapes)
        size = tensors.DTYPE_BITS[dtype] // 8 * math.prod(shape)
        entries[key] = Entry(dtype, shape, (position, position + size))
        position += size
    pieces = {key: Piece(key, entry.shape, (0,) * len(entry.shape)) for key, entry in entries.items() if draw(st.booleans())}
    return entries, pieces, position


def _parse(entries: dict[str, Entry], data_bytes: int) -> Header:
    header = encode_header(entries, {})
    return parse_header(header[8:], len(header) + data_bytes, "x.safetensors")


@given(_files())
def test_a_header_survives_its_round_trip(file: tuple[dict[str, Entry], dict[str, Piece], int]) -> None:
    """Names, shapes, offsets and pieces come back; the data begins on an 8-byte boundary."""
    entries, pieces, size = file
    encoded = encode_header(entries, pieces)
    header = parse_header(encoded[8:], len(encoded) + size, "x")
    assert (header.entries, header.pieces, header.data_start) == (entries, pieces, len(encoded))
    assert len(encoded) % 8 == 0


@given(_files(), st.integers(-40, 40).filter(bool))
def test_any_other_length_of_the_file_is_found(file: tuple[dict[str, Entry], dict[str, Piece], int], more: int) -> None:
    """C22: bytes cut off or added behind the data contradict the header."""
    entries, _, size = file
    with pytest.raises(ContractError, match=r"x\.safetensors"):
        _parse(entries, size + more)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(_files(), st.data())
def test_damage_to_a_header_is_a_contract_error_or_the_same_layout(
    tmp_path: Path, file: tuple[dict[str, Entry], dict[str, Piece], int], data: st.DataObject
) -> None:
    """Overwritten and cut headers: an error, or a header that still covers the file exactly; never another exception."""
    entries, pieces, size = file
    content = bytearray(encode_header(entries, pieces) + bytes(size))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        header = read_header(path)
    except ContractError:
        return
    ends = max((entry.data_offsets[1] for entry in header.entries.values()), default=0)
    assert header.data_start + ends == path.stat().st_size


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_no_exception_but_ours(body: bytes) -> None:
    """Whatever stands where the header should be, it is parsed or refused."""
    try:
        parse_header(body, 8 + len(body), "x")
    except ContractError:
        return


@pytest.mark.parametrize(
    ("entries", "data_bytes"),
    [
        ({"a": Entry("F32", (2,), (0, 4))}, 4),
        ({"a": Entry("F32", (2,), (0, 8)), "b": Entry("F32", (2,), (4, 12))}, 12),
        ({"a": Entry("F32", (2,), (0, 8)), "b": Entry("F32", (2,), (12, 20))}, 20),
        ({"a": Entry("F32", (2,), (8, 16))}, 16),
        ({"a": Entry("F32", (-1, -2), (0, 8))}, 8),
        ({"a": Entry("F32", (-2,), (8, 0))}, 0),
        ({"a": Entry("NEW8", (1,), (8, 0))}, 0),
        ({"a": Entry("NEW8", (1,), (-8, 0))}, 0),
    ],
    ids=[
        "too few bytes",
        "overlap",
        "gap",
        "late start",
        "negative shape",
        "backwards",
        "backwards, unknown dtype",
        "before the data",
    ],
)
def test_offsets_that_do_not_tile_the_data_are_refused(entries: dict[str, Entry], data_bytes: int) -> None:
    """Each tensor has exactly the bytes of its shape, one after the other."""
    with pytest.raises(ContractError, match="broken header"):
        _parse(entries, data_bytes)


def test_a_dtype_of_the_future_is_judged_by_its_offsets(tmp_path: Path) -> None:
    """A dtype unknown here is not damage."""
    assert _parse({"a": Entry("F4", (3,), (0, 2))}, 2).entries["a"].dtype == "F4"


@pytest.mark.parametrize("length", [0, 2, 2**63, 2**64 - 1, 10**8, 10**9])
def test_a_header_length_beyond_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    """C77: a length field of exabytes is compared with the file, not allocated."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}"[: 0 if length == 2 else 2])
    with pytest.raises(ContractError, match="broken header"):
        read_header(path)


def test_a_shape_of_countless_dimensions_is_refused_at_once() -> None:
    """C77: a product of a hundred thousand large numbers would take minutes; torch itself has at most 64 dimensions."""
    body = msgspec.json.encode({"a": {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 8]}})
    began = time.monotonic()
    with pytest.raises(ContractError, match="dimensions"):
        parse_header(body, 8 + len(body) + 8, "x")
    assert time.monotonic() - began < 5


def _header(*pieces: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Header:
    """A header of (name, whole shape, offset, extent) pieces."""
    entries = {f"{name}/{index}": Entry("U8", extent, (0, 0)) for index, (name, _, _, extent) in enumerate(pieces)}
    named = {f"{name}/{index}": Piece(name, whole, offset) for index, (name, whole, offset, _) in enumerate(pieces)}
    return Header(entries, named, 0)


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_shards_of_all_ranks_cover_and_any_lost_one_is_noticed(rows: int, ranks: int, data: st.DataObject) -> None:
    """C25: rows cut anywhere over the ranks are complete; without any one non-empty shard they are not."""
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1))), rows]
    shards = [
        _header(("w", (rows, 3), (begin, 0), (end - begin, 3))) for begin, end in zip(cuts, cuts[1:], strict=False) if end > begin
    ]
    assert check_coverage(shards) == []
    lost = data.draw(st.integers(0, len(shards) - 1))
    rest = shards[:lost] + shards[lost + 1 :]
    assert check_coverage(rest) != [] if rest else True


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ([_header(("w", (4,), (0,), (3,)))], "3 of 4"),
        ([_header(("w", (4,), (0,), (3,)), ("w", (4,), (2,), (2,)))], "overlap"),
        ([_header(("w", (4,), (2,), (3,)))], "outside"),
        ([_header(("w", (4,), (-1,), (3,)))], "outside"),
        ([_header(("w", (4,), (0, 0), (4,)))], "outside"),
        ([_header(("w", (4,), (0,), (4,))), _header(("w", (5,), (0,), (4,)))], "disagree"),
        ([Header({}, {"w": Piece("w", (4,), (0,))}, 0)], "data is missing"),
    ],
)
def test_pieces_that_do_not_make_the_tensor_are_named(headers: list[Header], named: str) -> None:
    """A hole, an overlap, a piece outside, ranks of different shapes, a piece without data: each in words."""
    problems = check_coverage(headers)
    assert problems
    assert any(named in problem for problem in problems)


def test_a_tensor_that_every_rank_wrote_whole_is_covered_once() -> None:
    """Replicated tensors are the same piece several times: no overlap."""
    assert check_coverage([_header(("w", (2, 2), (0, 0), (2, 2)))] * 3) == []
