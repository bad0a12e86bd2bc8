"""Verification: full against raw sequential read of the same files, quick of a checkpoint of a thousand files."""

import os
import shutil
import statistics
from pathlib import Path

from measure import Result, interleave, median_ratio, timed
from supervise_hooks.contract import digests, layout, tensors
from supervise_hooks.contract.manifest import FileEntry, Receipt, write_receipt
from supervise_hooks.contract.sealing import seal
from supervise_hooks.contract.verification import verify_sealed

FILES, FILE_BYTES, BLOCK, ROUNDS = 4, 128 << 20, 16 << 20, 5


def measure(folder: Path) -> list[Result]:
    """Cold reads: the page cache is dropped for these files before each."""
    big = _checkpoint(folder / "big" / "step-000000001", FILES, FILE_BYTES)
    small = _checkpoint(folder / "small" / "step-000000001", 500, 4096)  # 1,000 files: tensors and state
    size = sum(entry.stat().st_size for entry in big.iterdir())

    def full() -> float:
        _drop(big)
        seconds = timed(lambda: verify_sealed(big, "full"))
        assert verify_sealed(big, "quick")[0].verdict == "WHOLE"
        return seconds

    def raw() -> float:
        _drop(big)
        return timed(lambda: _read(big))

    seconds = interleave({"full": full, "raw": raw}, ROUNDS)
    quick_s = statistics.median(timed(lambda: verify_sealed(small, "quick")) for _ in range(15))
    assert verify_sealed(small, "quick")[0].verdict == "WHOLE"
    results = [
        Result(
            name="full verification against raw read",
            ratio=median_ratio(seconds["raw"], seconds["full"]),
            target=0.9,
            measured=f"{size / statistics.median(seconds['full']) / 1e9:.2f} GB/s against {size / statistics.median(seconds['raw']) / 1e9:.2f} GB/s, cold",
        ),
        Result(
            name="quick verification of 1,000 files",
            ratio=0.050 / quick_s,
            target=1.0,
            measured=f"{quick_s * 1e3:.1f} ms (budget 50 ms)",
        ),
    ]
    shutil.rmtree(folder / "big")
    return results


def _checkpoint(folder: Path, ranks: int, size: int) -> Path:
    folder.mkdir(parents=True)
    payload = os.urandom(1 << 20)
    for rank in range(ranks):
        entry = tensors.Entry("U8", (size,), (0, size))
        header = tensors.encode_header({f"t{rank}": entry}, {f"t{rank}": tensors.Piece(f"t{rank}", (size,), (0,))})
        body = (payload * (size // len(payload) + 1))[:size]
        contents = {layout.tensors_name(rank, ranks): header + body, layout.state_name(rank, ranks): b"{}\n"}
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        files = tuple(FileEntry(name, len(content), digests.digest_buffers([content])) for name, content in contents.items())
        write_receipt(
            folder, Receipt(run_id="bench", attempt=1, step=1, rank=rank, world_size=ranks, reason="periodic", files=files)
        )
    manifest, why = seal(folder)
    assert manifest is not None, why
    return folder


def _drop(folder: Path) -> None:
    os.sync()
    for entry in folder.iterdir():
        fd = os.open(entry, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _read(folder: Path) -> None:
    buffer = bytearray(BLOCK)
    for entry in sorted(folder.iterdir()):
        with open(entry, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
