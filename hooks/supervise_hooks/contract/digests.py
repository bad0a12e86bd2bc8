"""XXH3-128 digests of files and buffers: they find corruption, they do not stop tampering."""

import os
from collections.abc import Callable, Iterable

import xxhash

CHUNK = 16 << 20
"""Read size in bytes: big enough for full disk speed, small enough to stay in cache."""


def digest_buffers(buffers: Iterable[bytes | bytearray | memoryview]) -> str:
    """Hex XXH3-128 of the concatenation of `buffers`."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def digest_file(path: str | os.PathLike[str], on_bytes: Callable[[int], None] | None = None) -> str:
    """Hex XXH3-128 of a file's content; `on_bytes(n)` is called as it goes, for progress. Raises OSError."""
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(buffer[:count])
            if on_bytes is not None:
                on_bytes(count)
    return state.hexdigest()
