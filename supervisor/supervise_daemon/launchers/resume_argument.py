"""Putting the resume point into the user's command: exactly one resume argument, replaced at each attempt. Pure."""

PRESETS: dict[str, tuple[str, ...]] = {
    "default": ("--resume", "{path}"),
    "hf": ("--resume_from_checkpoint", "{path}"),
    "lightning": ("--ckpt_path", "{path}"),
    "none": (),
}


def with_resume(argv: tuple[str, ...], template: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    """`argv` with the template's option naming `path`; an older one of the same name is replaced. No path: unchanged.

    Words are never split, joined or quoted: they reach the program byte-identical.
    """
    if path is None or not template:
        return argv
    option = template[0].partition("=")[0]
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
            if not word.startswith("-"):  # else the user's option stood alone, as a switch
                continue
        if word == option and len(template) > 1:
            skip = True
            continue
        if word.startswith(option + "=") or (word == option and len(template) == 1):
            continue
        kept.append(word)
    return (*kept, *(part.replace("{path}", path) for part in template))
