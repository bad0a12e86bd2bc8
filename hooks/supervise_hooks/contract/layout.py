"""Names inside a checkpoint folder. Pure: parses and builds names, touches no disk.

<checkpoints>/step-000001234/             one checkpoint
    rank-00000-of-00002.safetensors       tensors this rank wrote
    rank-00000-of-00002.json              everything else of this rank
    rank-00000-of-00002.writing           a rank is writing; removed with its receipt
    rank-00000-of-00002.receipt.json      what the rank wrote: sizes, digests
    manifest.json                         written last; its presence is the commit
<checkpoints>/last, best                  links, hints only
<checkpoints>/set-aside/                  checkpoints found torn: moved, never deleted
"""

import re

MANIFEST = "manifest.json"
SET_ASIDE = "set-aside"
LAST = "last"
BEST = "best"

_STEP = re.compile(r"step-(\d{1,18})(?:-a(\d{1,9}))?")
_RANK = re.compile(r"rank-(\d{5,9})-of-(\d{5,9})\.(safetensors|json|writing|receipt\.json)")


def step_name(step: int, attempt: int | None = None) -> str:
    """Folder name of a checkpoint. With `attempt`: the name used when another attempt already sealed that step."""
    name = f"step-{step:09d}"
    return name if attempt is None else f"{name}-a{attempt:04d}"


def parse_step(name: str) -> int | None:
    """The step a folder name stands for, or None if it is not one of our names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def rank_stem(rank: int, world_size: int) -> str:
    """Common beginning of the names of one rank's files."""
    return f"rank-{rank:05d}-of-{world_size:05d}"


def tensors_name(rank: int, world_size: int) -> str:
    """Name of a rank's tensor file."""
    return rank_stem(rank, world_size) + ".safetensors"


def state_name(rank: int, world_size: int) -> str:
    """Name of a rank's JSON state file."""
    return rank_stem(rank, world_size) + ".json"


def writing_name(rank: int, world_size: int) -> str:
    """Name of the mark that a rank is writing here."""
    return rank_stem(rank, world_size) + ".writing"


def receipt_name(rank: int, world_size: int) -> str:
    """Name of a rank's receipt."""
    return rank_stem(rank, world_size) + ".receipt.json"


def parse_rank_file(name: str) -> tuple[int, int, str] | None:
    """(rank, world size, kind) of a rank's file; kind is `safetensors`, `json`, `writing` or `receipt.json`."""
    match = _RANK.fullmatch(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def is_safe_relative(path: str) -> bool:
    """Whether a path found inside a manifest stays inside the checkpoint: relative, no `..`, no NUL, sane length."""
    return (
        0 < len(path) <= 1024
        and "\0" not in path
        and not path.startswith("/")
        and all(part not in ("", ".", "..") and len(part) <= 255 for part in path.split("/"))
    )
