"""`forewarn export`: each format is read back with its own library and gives the very readings of the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forewarn.store import Run, RunWriter, StoredSeries, open_run
from forewarn.types import Block, RunInfo
from tests.cli.conftest import Said

Call = Callable[..., Said]
STORED = Path(__file__).parent.parent / "golden" / "stored"
LAYERS = ("a.weight", 'b,"c"\n', "")


def block(step: int, name: str, *values: float, scopes: tuple[str, ...] = ("",)) -> Block:
    return Block(step, 1.7e9 + step / 3, name, scopes, np.array(values, np.float32))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with numbers that are not finite, hostile names, a step recorded twice and a layer that comes later."""
    writer = RunWriter(tmp_path / "made", info=RunInfo(model="Net"), config={})
    for step in range(600):
        blocks = [block(step, "train/loss", np.nan if step == 7 else 1 / (step + 3))]
        blocks.append(block(step, "speed/step_seconds", 0.1))
        if step % 10 == 0:
            scopes = LAYERS[: 2 if step < 300 else 3]
            blocks.append(block(step, "gradient/norm", *[step + 0.1, np.inf, -1e-30][: len(scopes)], scopes=scopes))
        writer.append(step, blocks)
    writer.append(599, [block(599, "train/loss", 9.0)])
    writer.close()
    with open_run(tmp_path / "made") as stored:
        yield stored


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Run]:
    """A real run with alerts and histograms."""
    with tarfile.open(STORED / "lr-jump.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    with open_run(tmp_path / "lr-jump") as stored:
        yield stored


def all_series(run: Run) -> dict[tuple[str, str], StoredSeries]:
    return {(name, scope): run.series(name, scope) for name in run.names() for scope in run.scopes(name)}


def check_table(table: pd.DataFrame, run: Run) -> None:
    """Every series is there, bit for bit, and nothing else."""
    assert list(table.columns) == ["step", "unix_seconds", "metric", "scope", "value", "unit"]
    expected = all_series(run)
    groups = dict(iter(table.groupby(["metric", "scope"], observed=True, sort=False)))
    assert set(groups) == set(expected)
    for key, series in expected.items():
        assert groups[key]["step"].tolist() == series.steps.tolist()
        assert groups[key]["unix_seconds"].tolist() == series.times.tolist()
        assert groups[key]["value"].to_numpy(np.float32).tobytes() == series.values.tobytes()
    units = dict(zip(table["metric"], table["unit"], strict=True))
    assert units["speed/step_seconds"] == "s"
    assert units["train/loss"] == ""


@pytest.mark.parametrize("which", ["run", "real"])
def test_a_csv_file_read_by_pandas_has_every_reading(
    forewarn: Call, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    said = forewarn("export", run.path, "--to", "csv", "-o", tmp_path / "out.csv")
    assert said.code == 0
    assert said.out.startswith(f"Wrote {tmp_path / 'out.csv'}: {len(all_series(run))} series, ")
    table = pd.read_csv(tmp_path / "out.csv", dtype={"scope": str, "unix_seconds": str}, keep_default_na=False)
    check_table(table.astype({"value": float, "unix_seconds": float}), run)


def test_json_lines_have_the_same_rows_and_null_for_numbers_that_are_not_finite(
    forewarn: Call, run: Run, tmp_path: Path
) -> None:
    forewarn("export", run.path, "--to", "json", "-o", tmp_path / "out.jsonl")
    rows = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]
    ]
    losses = [row for row in rows if row["metric"] == "train/loss"]
    expected = run.series("train/loss")
    assert [row["step"] for row in losses] == expected.steps.tolist()
    assert losses[7]["value"] is None
    assert [np.float32(row["value"]) for row in losses[8:]] == expected.values[8:].tolist()
    assert {row["scope"] for row in rows} == {"", *LAYERS}
    assert {row["value"] for row in rows if row["scope"] == LAYERS[1]} == {None}


@pytest.mark.parametrize("which", ["run", "real"])
def test_a_parquet_file_read_by_pyarrow_has_every_reading(
    forewarn: Call, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    forewarn("export", run.path, "--to", "parquet", "-o", tmp_path / "out.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("value").type) == "float"
    assert table.schema.metadata[b"forewarn.model"].decode() == run.info.model
    check_table(table.to_pandas(), run)
    only = pd.read_parquet(tmp_path / "out.parquet", filters=[("metric", "==", "train/loss")])
    assert len(only) == len(run.series("train/loss"))


@pytest.mark.parametrize("which", ["run", "real"])
def test_an_hdf5_file_read_by_h5py_has_a_matrix_for_each_metric(
    forewarn: Call, which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue(which)
    forewarn("export", run.path, "--to", "hdf5", "-o", tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        for (name, scope), series in all_series(run).items():
            group = file[name]
            column = group["scopes"].asstr()[:].tolist().index(scope)
            steps, values = group["steps"][:], group["values"][:, column]
            last = dict(zip(series.steps.tolist(), series.values, strict=True))
            assert sorted(set(run.steps_of(name))) == steps.tolist()
            expected = np.array([last.get(step, np.nan) for step in steps.tolist()], np.float32)
            np.testing.assert_array_equal(values, expected)
            times = dict(zip(steps.tolist(), group["unix_seconds"][:].tolist(), strict=True))
            assert times[int(series.steps[-1])] == series.times[-1]
        assert file["speed/step_seconds"].attrs["unit"] == "s"
        assert file["speed/step_seconds"].attrs["meaning"].endswith(".")


def test_event_files_read_by_tensorboard_have_every_reading_histogram_and_alert(
    forewarn: Call, real: Run, tmp_path: Path
) -> None:
    forewarn("export", real.path, "--to", "tensorboard", "-o", tmp_path / "logs")
    board = EventAccumulator(str(tmp_path / "logs"), {"scalars": 0, "histograms": 0, "tensors": 0}).Reload()
    expected = all_series(real)
    assert len(board.Tags()["scalars"]) == len(expected)
    for (name, scope), series in expected.items():
        family, _, quantity = name.partition("/")
        tag = f"{family}/{re.sub('[^a-zA-Z0-9_.-]', '_', scope)}/{quantity}" if scope and name != "train/lr" else name
        events = board.Scalars(tag)
        assert [event.step for event in events] == series.steps.tolist()
        assert np.array([event.value for event in events], np.float32).tobytes() == series.values.tobytes()
    name, scopes = next(iter(real.distributions().items()))
    stored = real.histograms(name, scopes[0])
    family, _, quantity = name.partition("/")
    shown = board.Histograms(f"{family}/{scopes[0]}/{quantity}")
    assert [event.step for event in shown] == stored.steps.tolist()
    assert [event.wall_time for event in shown] == stored.times.tolist()
    assert shown[-1].histogram_value.num == stored.counts[-1].sum() + stored.zeros[-1]
    texts = [tag for tag in board.Tags()["tensors"] if tag.startswith("alerts/")]
    fired = {f"alerts/{alert.code}-{alert.name}" for alert in real.alerts() if alert.fired is not None}
    assert {tag.removesuffix("/text_summary") for tag in texts} == fired


def test_nan_and_infinity_reach_tensorboard_too(forewarn: Call, run: Run, tmp_path: Path) -> None:
    forewarn("export", run.path, "--to", "tensorboard", "-o", tmp_path / "logs", "--metric", "train/loss")
    board = EventAccumulator(str(tmp_path / "logs"), {"scalars": 0}).Reload()
    assert board.Tags()["scalars"] == ["train/loss"]
    assert np.isnan(board.Scalars("train/loss")[7].value)


def test_filters_choose_metrics_layers_and_steps_as_those_of_a_frame(forewarn: Call, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    said = forewarn(
        "export", run.path, "--to", "csv", "-o", out, "--metric", "grad*", "--metric", "loss$", "--scope", "a.weight",
        "--scope", "", "--steps", "290:310",
    )  # fmt: skip
    assert said.code == 0
    table = pd.read_csv(out, keep_default_na=False)
    frame = run.to_pandas(["grad*", "loss$"], ["a.weight", ""], steps=(290, 310), long=True)
    keys = ["metric", "scope", "step"]
    np.testing.assert_array_equal(
        table.sort_values(keys)["value"].to_numpy(np.float32), frame.sort_values(keys)["value"].to_numpy()
    )
    assert len(table) == 21 + 3 + 2, "both ends of the range are included"
    forewarn("export", run.path, "--to", "csv", "-o", out, "--overwrite", "--steps", "598:", "--metric", "train/loss")
    assert pd.read_csv(out)["step"].tolist() == [598, 599, 599]


@pytest.mark.parametrize("form", ["csv", "json", "parquet", "hdf5", "tensorboard"])
def test_a_run_without_readings_becomes_an_empty_file(forewarn: Call, form: str, tmp_path: Path) -> None:
    RunWriter(tmp_path / "empty", info=RunInfo(), config={}).close()
    said = forewarn("export", tmp_path / "empty", "--to", form, "-o", tmp_path / "out")
    assert (said.code, said.err) == (0, "")
    assert (tmp_path / "out").exists()


def test_the_default_name_is_that_of_the_run(
    forewarn: Call, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for form in ("csv", "json", "parquet", "hdf5", "tensorboard"):
        assert forewarn("export", run.path, "--to", form).code == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"made", "made.csv", "made.jsonl", "made.parquet", "made.h5", "made-tensorboard"}


def test_nothing_is_overwritten_unless_told_and_a_folder_of_others_never(
    forewarn: Call, run: Run, tmp_path: Path
) -> None:
    out, logs = tmp_path / "out.csv", tmp_path / "logs"
    out.write_text("mine")
    said = forewarn("export", run.path, "--to", "csv", "-o", out)
    assert (said.code, out.read_text()) == (3, "mine")
    assert "--overwrite" in said.err
    assert forewarn("export", run.path, "--to", "csv", "-o", out, "--overwrite").code == 0
    assert out.read_text().startswith("step,")
    assert forewarn("export", run.path, "--to", "tensorboard", "-o", logs).code == 0
    assert forewarn("export", run.path, "--to", "tensorboard", "-o", logs, "--overwrite").code == 0
    assert len(list(logs.iterdir())) == 1
    (logs / "thesis.tex").write_text("mine")
    said = forewarn("export", run.path, "--to", "tensorboard", "-o", logs, "--overwrite")
    assert said.code == 3
    assert "thesis.tex, which is no event file" in said.err
    assert (logs / "thesis.tex").read_text() == "mine"
    assert not list(tmp_path.glob("*.draft"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--to", "csv", "--metric", "train/lss"], 3, "no metric matches 'train/lss'; did you mean 'train/loss'?"),
        (["--to", "csv", "--metric", "("], 3, "'(' is neither a metric nor a valid regular expression"),
        (["--to", "csv", "--steps", "9"], 64, "'9' is not a range of steps"),
        (["--to", "csv", "--steps", "9:3"], 64, "'9:3' ends before it begins"),
        (["--to", "xml"], 64, "'xml' is not one of"),
        (["--to", "csv", "-o", "no/such/folder/out.csv"], 3, "no/such/folder/out.csv cannot be written: No such file"),
        (["--to", "csv", "-o", ".", "--overwrite"], 3, ". is a folder; name another path"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    forewarn: Call, run: Run, arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent)
    said = forewarn("export", run.path, *arguments)
    assert said.code == code
    assert words in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("package", "form", "words"),
    [
        ("pyarrow", "parquet", "Parquet needs pyarrow: pip install 'forewarn[parquet]'"),
        ("h5py", "hdf5", "HDF5 needs h5py: pip install 'forewarn[hdf5]'"),
        ("tensorboard", "tensorboard", "TensorBoardView needs tensorboard: pip install 'forewarn[tensorboard]'"),
    ],
)
def test_a_missing_package_is_one_sentence_and_leaves_nothing_behind(
    run: Run, tmp_path: Path, package: str, form: str, words: str
) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None
from forewarn.cli import main
main(["export", {str(run.path)!r}, "--to", {form!r}, "-o", {str(tmp_path / "out")!r}])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert ended.stderr == f"Error: {words}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"made"}


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "large", info=RunInfo(), config={})
    scopes = tuple(f"layer{number}" for number in range(1000))
    values = np.random.default_rng(0).random(1000, np.float32)
    for step in range(1500):
        writer.append(step, [Block(step, 1.0, "gradient/norm", scopes, values)])
    writer.close()
    out = tmp_path / "out.csv"
    out.write_text("before")
    command = [sys.executable, "-m", "forewarn", "export", str(tmp_path / "large"), "--to", "csv", "-o", str(out)]
    exporting = subprocess.Popen([*command, "--overwrite"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (drafts := list(tmp_path.glob("*.draft"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert drafts
    exporting.send_signal(signal.SIGINT)
    assert exporting.wait(30) == 130
    exporting.stderr.close()
    assert out.read_text() == "before"
    assert not list(tmp_path.glob("*.draft"))


@pytest.mark.ci
def test_a_run_larger_than_the_memory_that_an_export_may_use(tmp_path: Path) -> None:
    """3 million readings would take more than 300 MB as Python objects."""
    writer = RunWriter(tmp_path / "large", info=RunInfo(), config={})
    scopes = tuple(f"layer{number}" for number in range(3000))
    values = np.random.default_rng(0).random((10, 3000), np.float32)
    for step in range(1000):
        writer.append(step, [Block(step, 1.0, "gradient/norm", scopes, values[step % 10])])
        if step % 200 == 0:
            writer.flush()
    writer.close()
    script = """
import resource, sys
from forewarn.cli import main
import forewarn.views.export.tables, forewarn.views.export.hdf5_file, h5py, pyarrow.parquet, rich.progress
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main(sys.argv[1:])
except SystemExit:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    for form in ("parquet", "hdf5"):
        arguments = ["export", str(tmp_path / "large"), "--to", form, "-o", str(tmp_path / form)]
        ended = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True, env=os.environ
        )
        assert int(ended.stdout.splitlines()[-1]) < 150, "MB"
