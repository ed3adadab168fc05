"""A network file system is recognised, and the database is kept without shared memory there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forewarn.store import open_run
from forewarn.store.mounts import network_file_system
from tests.store.rows import append_all, check_against, training

_MOUNTS = [
    ("/", "ext4"),
    ("/home", "nfs4"),
    ("/home/me/scratch", "xfs"),
    ("/mnt/bucket", "fuse.sshfs"),
    ("/mnt/share", "CIFS"),
    ("/lustre", "autofs"),
    ("/lustre", "lustre"),
    ("/proc", "proc"),
]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/tmp/run", None),
        ("/home/me/run", "nfs4"),
        ("/homes/run", None),
        ("/home/me/scratch/run", None),
        ("/mnt/bucket", "fuse.sshfs"),
        ("/mnt/share/a/b/c", "cifs"),
        ("/lustre/run", "lustre"),
    ],
)
def test_the_mount_that_holds_a_path_decides(path, kind):
    assert network_file_system(Path(path), _MOUNTS) == kind


def test_this_machine_has_a_mount_table(tmp_path):
    assert network_file_system(Path("/proc/self")) is None


def test_a_run_on_a_network_file_system_is_kept_without_a_write_ahead_log(tmp_path, write, monkeypatch):
    monkeypatch.setattr("forewarn.store.mounts._mounts_here", lambda: [("/", "nfs4")])
    rows = training(600)
    writer = write()
    append_all(writer, rows)
    writer.flush()
    assert writer.journal == "TRUNCATE"
    assert not (tmp_path / "run" / "run.db-wal").exists()
    with open_run(tmp_path / "run") as run:
        assert run.journal == "TRUNCATE"
        check_against(run, rows)
        writer.close()
        check_against(run, rows)
    assert writer.failure is None
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["run.db", "run.json", "summary.json"]
