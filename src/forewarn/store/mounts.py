"""The file system of a path. SQLite's write-ahead log needs shared memory, which network file systems lack."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

# https://www.sqlite.org/wal.html: "All processes using a database must be on the same host computer; WAL does not work
# over a network filesystem." The same holds for shares between a virtual machine and its host (9p, virtiofs, vboxsf).
_NETWORK = frozenset(
    (
        *("9p", "drvfs", "prl_fs", "vboxsf", "virtiofs", "vmhgfs"),
        *(
            "afpfs",
            "afs",
            "cifs",
            "coda",
            "davfs",
            "ncpfs",
            "nfs",
            "nfs3",
            "nfs4",
            "smb",
            "smb2",
            "smb3",
            "smbfs",
            "webdav",
        ),
        *(
            "beegfs",
            "ceph",
            "gfs2",
            "glusterfs",
            "gpfs",
            "lustre",
            "ocfs2",
            "orangefs",
            "panfs",
            "pvfs2",
            "quobyte",
            "wekafs",
        ),
    )
)


def network_file_system(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str | None:
    """The type of the network file system that `path` lies on, such as `nfs4`; None on a local disk.

    `mounts` are pairs of mount point and type in mounting order; by default those of this machine.
    """
    place = PurePath(path.resolve())
    kind, depth = "", -1
    for point, candidate in _mounts_here() if mounts is None else mounts:
        directory = PurePath(point)
        if place.is_relative_to(directory) and len(directory.parts) >= depth:
            kind, depth = candidate.lower(), len(directory.parts)
    # Few FUSE mounts are local, and the slower journal works on all of them.
    return kind if kind in _NETWORK or kind.startswith("fuse.") else None


def _mounts_here() -> list[tuple[str, str]]:
    import psutil  # type: ignore[import-untyped,unused-ignore]

    try:
        return [(partition.mountpoint, partition.fstype) for partition in psutil.disk_partitions(all=True)]
    except OSError:  # a sandbox without a mount table
        return []
