"""Whatever is in a run directory, a command ends soon, in little memory, with a verdict or one sentence."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from forewarn.store import RunWriter
from forewarn.types import RunInfo
from tests.forked_commands import Ended, ForkedCommands, forked_commands
from tests.store.hostile import ZLIB_BOMB, Variant, fixed_variants, random_variants
from tests.store.rows import append_all, training

STORED = Path(__file__).parents[1] / "golden" / "stored"
TRAINED = ("failing-probe", "evaluation", "tasks")
PICTURES = (("show",), ("show", "--histogram", "layers.0.weight"), ("forecast",))
"""What shows a run beside `ls` and `check`; the first run has histograms of this tensor."""
NUM_PARTS = 10
MOST_SECONDS = 2.0
MOST_MEGABYTES = 300.0


@pytest.fixture(scope="module")
def command() -> Iterator[ForkedCommands]:
    with forked_commands() as commands:
        yield commands


@pytest.fixture(scope="module")
def real_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small runs: some that were trained, and one whose writer was killed, so that its log is left."""
    home = tmp_path_factory.mktemp("real")
    for name in TRAINED:
        with tarfile.open(STORED / f"{name}.tar.xz") as archive:
            archive.extractall(home, filter="data")
    writer = RunWriter(home / "live", info=RunInfo(), config={})
    append_all(writer, training(60))
    writer.event("made", by="hand")
    writer.flush()
    shutil.copytree(home / "live", home / "killed")
    writer.close()
    return {name: home / name for name in (*TRAINED, "killed")}


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
        assert "please report a bug" not in ended.err
    else:
        assert ended.err == ""


def check_variant(command: ForkedCommands, variant: Variant, runs: Path, pictures: Sequence[Sequence[str]]) -> None:
    """`ls` shows the sound run beside the changed one all the same, and every other command has an answer to it."""
    run = runs / "hostile"
    shutil.copytree(runs / "sound", run)
    variant.change(run)
    try:
        listed = command("ls", runs)
        check_ended(listed, range(1))
        assert "sound" in listed.out
        check_ended(command("check", run))
        for name, *options in pictures:
            check_ended(command(name, run, *options))
    except AssertionError as error:
        raise AssertionError(f"{variant.name}: {error}") from error
    finally:
        shutil.rmtree(run)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_command_survives_what_a_run_directory_holds(command, real_runs, tmp_path, part):
    """Some 300 variants: all kinds of files, schemas and pages, and a few of the thousands of wrong values."""
    original = real_runs["failing-probe"]
    shutil.copytree(original, tmp_path / "sound")
    variants = [*fixed_variants(original), *random_variants(original, Random(0), 27)]
    assert len(variants) >= 300
    for number, variant in enumerate(variants[part::NUM_PARTS]):
        turn = 1 if "histogram" in variant.name else number % len(PICTURES)
        check_variant(command, variant, tmp_path, PICTURES[turn : turn + 1])


def test_a_command_survives_a_stream_that_inflates_without_end(command, real_runs, tmp_path):
    shutil.copytree(real_runs["failing-probe"], tmp_path / "sound")
    check_variant(command, ZLIB_BOMB, tmp_path, PICTURES)


@pytest.mark.ci
@pytest.mark.parametrize("name", [*TRAINED, "killed"])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_command_survives_thousands_of_directories(command, real_runs, tmp_path, name, part):
    shutil.copytree(real_runs[name], tmp_path / "sound")
    fixed = list(fixed_variants(real_runs[name]))[part::NUM_PARTS]
    for variant in (*fixed, *random_variants(real_runs[name], Random(part + 1), 15)):
        check_variant(command, variant, tmp_path, PICTURES)
