"""Steps in the names that other frameworks give their files. Pure. Numbers are compared as numbers elsewhere."""

import re

_STEP = re.compile(r"(?:step|iter|global_step|checkpoint|ckpt)[-_=]?(\d{1,18})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,18})(?!.*\d)")


def step_in_name(name: str) -> int | None:
    """The number after `step`, `iter`, `checkpoint` or `ckpt`; else the last number; None without one."""
    match = _STEP.search(name) or _LAST_NUMBER.search(name)
    return int(match[1]) if match else None
