"""Files of others are read with a limit; files of our own are made new and put in place in one go."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_AS_IT_IS = getattr(os, "O_BINARY", 0)


def check_regular(path: Path, *, links: bool = True) -> None:
    """Raise OSError for what is there and is not a regular file: a FIFO would hang whoever opens it.

    A symbolic link counts as what it leads to, unless `links` are refused as well.
    """
    try:
        mode = os.stat(path, follow_symlinks=links).st_mode
    except FileNotFoundError:
        return
    _check_mode(mode, path)


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else, and for one that is larger than that."""
    check_regular(Path(path))  # before it is opened: a device may act on that
    descriptor = os.open(path, os.O_RDONLY | _NO_WAITING | _AS_IT_IS)
    with open(descriptor, "rb") as file:
        _check_mode(os.fstat(descriptor).st_mode, path)  # it may have been replaced in between
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MB", str(path))
    return content


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when all of it is on disk; nobody ever sees half of it.

    It is made beside it and follows no link that somebody may have planted there. Its mode is as the umask says.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of a killed process that had the same number
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS | _AS_IT_IS, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _check_mode(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'not a regular file')}", str(path))


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO, not a regular file",
    stat.S_IFLNK: "a link, not a regular file",
    stat.S_IFSOCK: "a socket, not a regular file",
    stat.S_IFCHR: "a device, not a regular file",
    stat.S_IFBLK: "a device, not a regular file",
}
