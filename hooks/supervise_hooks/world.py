"""Which rank this process is, and where its peers' store is. Read from torch.distributed if it runs, else the environment."""

import sys
from collections.abc import Mapping

import msgspec

from supervise_hooks.contract.errors import SuperviseError


class World(msgspec.Struct, frozen=True, kw_only=True):
    """This process among its peers."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = ""
    """Of the shared store; empty for a single rank."""
    port: int = 0
    generation: str = "0"
    """torchrun's restart count: keys of an earlier one are still in its store (torch 2.13)."""


def find_world(environ: Mapping[str, str]) -> World:
    """This rank's place. Raises SuperviseError when there are peers but no way to reach them."""
    rank, world_size = _place(environ)
    local_rank = _number(environ, "LOCAL_RANK", rank)
    generation = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not 0 <= rank < world_size:
        raise SuperviseError(f"cannot attach: rank {rank} is not one of a world of {world_size} (RANK, WORLD_SIZE)")
    if world_size == 1:
        return World(rank=rank, local_rank=local_rank, generation=generation)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise SuperviseError(
            f"cannot attach rank {rank} of {world_size}: {' and '.join(missing)} not set, so the ranks cannot agree on a step; "
            "start the script with torchrun, or set what torch.distributed's env:// needs"
        )
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        host=environ["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT", 0),
        generation=generation,
    )


def _place(environ: Mapping[str, str]) -> tuple[int, int]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    return _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise SuperviseError(f"cannot attach: {name} is {text!r}, not a number") from None
