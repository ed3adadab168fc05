"""Reads untrusted files with a size limit, and replaces files atomically."""

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
    """Raise OSError if the path exists and is not a regular file: opening a FIFO would hang.

    Symbolic links are followed, unless `links` is false.
    """
    try:
        mode = os.stat(path, follow_symlinks=links).st_mode
    except FileNotFoundError:
        return
    _check_mode(mode, path)


def read_regular(path: str | Path, most_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError if it is larger than `most_bytes` or not a regular file."""
    check_regular(Path(path))  # before opening it: that alone may trigger a device
    descriptor = os.open(path, os.O_RDONLY | _NO_WAITING | _AS_IT_IS)
    with open(descriptor, "rb") as file:
        _check_mode(os.fstat(descriptor).st_mode, path)  # it may have been replaced meanwhile
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MB", str(path))
    return content


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A new file that replaces `path` once it is complete, so that nobody ever sees half of it.

    It is created next to `path` without following links, with the permissions of the umask. Without `durable`, it is
    not synced to disk and may be empty after a power failure.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # left by a killed process with the same process id
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINKS | _AS_IT_IS, 0o666)
    try:
        with open(descriptor, "w+b") as file:  # writers of HDF5 read what they wrote
            yield file
            file.flush()
            if durable:
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
