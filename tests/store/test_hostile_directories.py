"""Whatever is in a run directory, a command ends soon, in little memory, with a verdict or one sentence."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from forewarn.store import RunWriter
from forewarn.types import RunInfo
from tests.forked_commands import Ended, ForkedCommands, forked_commands
from tests.store.hostile import ESCAPES, Variant, all_variants
from tests.store.rows import append_all, training

STORED = Path(__file__).parents[1] / "golden" / "stored"
MOST_SECONDS = 2.0
MOST_MEGABYTES = 300.0


@pytest.fixture(scope="module")
def command() -> Iterator[ForkedCommands]:
    with forked_commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs: two that were trained, and one whose writer was killed, so that its log is left."""
    home = tmp_path_factory.mktemp("real")
    for name in ("evaluation", "tasks"):
        with tarfile.open(STORED / f"{name}.tar.xz") as archive:
            archive.extractall(home, filter="data")
    writer = RunWriter(home / "live", info=RunInfo(), config={})
    append_all(writer, training(60))
    writer.event("made", by="hand")
    writer.flush()
    shutil.copytree(home / "live", home / "killed")
    writer.close()
    return {name: home / name for name in ("evaluation", "tasks", "killed")}


def check_ended(ended: Ended, codes: range = range(4)) -> None:
    assert ended.code in codes, ended
    assert ended.seconds < MOST_SECONDS, ended.seconds
    assert ended.megabytes < MOST_MEGABYTES, ended.megabytes
    for text in (ended.out, ended.err):
        assert "Traceback" not in text
        assert all(char.isprintable() or char == "\n" for char in text), text
    if ended.code == 3:
        assert ended.out == ""
        assert ended.err.startswith("Error: ")
        assert ended.err.count("\n") == 1
        assert "report" not in ended.err
    else:
        assert ended.err == ""


def check_commands(command: ForkedCommands, runs: Path, run: Path) -> None:
    """Every command that reads a run; `ls` shows the healthy one beside it all the same."""
    listed = command("ls", runs)
    check_ended(listed, range(1))
    assert "sound" in listed.out
    check_ended(command("check", run))
    check_ended(command("show", run))
    check_ended(command("forecast", run))


def check_variant(command: ForkedCommands, variant: Variant, original: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(original, runs / "sound")
    shutil.copytree(original, runs / "hostile")
    variant.change(runs / "hostile")
    try:
        check_commands(command, runs, runs / "hostile")
    except AssertionError as error:
        raise AssertionError(f"{original.name}, {variant.name}: {error}") from error
    finally:
        shutil.rmtree(runs)


def chosen(original: Path, seed: int, share: float, part: int, parts: int) -> list[Variant]:
    return list(all_variants(original, Random(seed), share))[part::parts]


@pytest.mark.parametrize("part", range(10))
def test_a_command_survives_what_a_run_directory_holds(command, real_runs, tmp_path, part):
    """About 300 variants: all kinds of files and schemas, and a few of each of the thousands of wrong values."""
    for number, variant in enumerate(chosen(real_runs["evaluation"], part, 0.01, part, 10)):
        check_variant(command, variant, real_runs["evaluation"], tmp_path / str(number))
