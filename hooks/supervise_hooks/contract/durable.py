"""The only way this house writes files: temporary in the same folder, fsync, rename, fsync of the folder.

After `write` returns, a power cut leaves either the old content or the new one, never a mixture.
Readers that see the final name see whole bytes.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

TEMP_PREFIX = ".tmp-"

Buffer = bytes | bytearray | memoryview


def temp_name(final_name: str) -> str:
    """A hidden, unguessable sibling name; `is_temp` recognises it."""
    return f"{TEMP_PREFIX}{final_name}.{secrets.token_hex(4)}"


def is_temp(name: str) -> bool:
    """Whether `name` is a leftover of an interrupted durable write."""
    return name.startswith(TEMP_PREFIX)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames and creations in `folder` survive a power cut. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: str | os.PathLike[str], mode: int = 0o777) -> None:
    """`mkdir -p`, durable: every folder it creates is synced into its parent."""
    folder = Path(folder)
    missing = [folder] if not folder.exists() else []
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # a peer rank was faster
            path.mkdir(mode=mode)
        sync_folder(path.parent)


def write_all(fd: int, buffer: Buffer) -> None:
    """Write every byte of `buffer` at the file's position. Raises OSError (ENOSPC, EDQUOT, EIO)."""
    view = memoryview(buffer).cast("B")
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[int]:
    """Yield a descriptor of a temporary; on a clean exit it durably becomes `path`.

    On any exception the temporary is removed and `path` keeps its old content. The mode is subject to the umask.
    """
    path = Path(path)
    temp = path.with_name(temp_name(path.name))
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temp.unlink()
        raise
    sync_folder(path.parent)


def write(path: str | os.PathLike[str], content: Buffer | Iterable[Buffer], mode: int = 0o666) -> None:
    """Durably put `content` at `path`, whole or not at all. Raises OSError."""
    with replacing(path, mode) as fd:
        for buffer in [content] if isinstance(content, bytes | bytearray | memoryview) else content:
            write_all(fd, buffer)


def point(link: str | os.PathLike[str], target: str) -> None:
    """Durably make the symbolic link `link` name `target`, replacing an older link. Raises OSError."""
    link = Path(link)
    temp = link.with_name(temp_name(link.name))
    os.symlink(target, temp)
    try:
        os.replace(temp, link)
    except BaseException:
        temp.unlink()
        raise
    sync_folder(link.parent)


def move(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Durably rename a file or folder within one filesystem. Raises OSError; never overwrites a full folder."""
    os.rename(source, target)
    sync_folder(Path(target).parent)
    if Path(source).parent != Path(target).parent:
        sync_folder(Path(source).parent)
