"""Histograms come back from the run directory as they were handed over."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forewarn.store import RunError, RunWriter, open_run
from forewarn.store.blobs import bands, packed, unpacked
from forewarn.store.errors import UnknownSeriesError
from forewarn.types import Block, Distribution, RunInfo
from tests.store.rows import append_all, check_against, training

NAME = "gradient/histogram"
SCOPES = tuple(f"blocks.{at}.weight" for at in range(150))


def made(step: int, scopes: tuple[str, ...] = SCOPES, name: str = NAME) -> Distribution:
    """Bells of different widths, different at every step."""
    random = np.random.default_rng(step)
    counts = np.zeros((len(scopes), 2, 64), np.int64)
    for at in range(len(scopes)):
        for sign in (0, 1):
            exponents = np.floor(np.log2(np.abs(random.normal(0, 2.0 ** (at % 7 - 9), 300)))).astype(int)
            counts[at, sign] = np.bincount(exponents + 40, minlength=64)
    return Distribution(step, 1e9 + step, name, scopes, counts, random.integers(0, 50, len(scopes)))


def check(run, name: str, expected: list[Distribution], scopes=(0, 63, 64, 149)) -> None:
    for at in scopes:
        found = run.histograms(name, SCOPES[at])
        assert found.steps.tolist() == [one.step for one in expected]
        assert found.times.tolist() == [one.time for one in expected]
        assert np.array_equal(found.counts, np.array([one.counts[at] for one in expected]).reshape(-1, 2, 64))
        assert found.zeros.tolist() == [one.zeros[at] for one in expected]


def first_blob(one: Distribution) -> bytes:
    """All scopes in the blob that format 1 had: a zlib stream of a header and of the counts, byte by byte."""
    numbers = np.concatenate([one.counts.reshape(len(one.counts), 2 * 64), one.zeros[:, None]], axis=1)
    planes = b"".join(((numbers >> shift) & 0xFF).astype(np.uint8).tobytes() for shift in (0, 8))
    return zlib.compress(bytes([0, 64, 2]) + planes)


def read(path: Path, statement: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path / "run.db")
    found = connection.execute(statement).fetchall()
    connection.close()
    return found


def read_bodies(path: Path) -> list[bytes]:
    return [body for (body,) in read(path, "SELECT body FROM distributions ORDER BY id")]


def change(path: Path, statement: str, *parameters: object) -> None:
    connection = sqlite3.connect(path / "run.db")
    connection.execute(statement, parameters)
    connection.commit()
    connection.close()


@pytest.mark.usefixtures("small_chunks")
def test_histograms_come_back_live_and_after_the_end_and_leave_the_series_alone(tmp_path, write):
    rows = training(120)
    recorded = {step: made(step) for step in range(0, 120, 10)}
    writer = write()
    with open_run(tmp_path / "run") as run:
        for step, blocks in rows[:60]:
            writer.append(step, blocks, [recorded[step]] if step in recorded else [])
        writer.flush()
        check(run, NAME, [one for step, one in recorded.items() if step < 60])
        for step, blocks in rows[60:]:
            writer.append(step, blocks, [recorded[step]] if step in recorded else [])
        writer.close()
        check(run, NAME, list(recorded.values()))
        check_against(run, rows)
        assert run.distributions() == {NAME: SCOPES}
        assert NAME not in run.names()


def test_a_resumed_run_has_no_histogram_from_the_cut_on(tmp_path, write):
    writer = write()
    for step in range(10):
        writer.append(step, [], [made(step), made(step, name="weight/histogram")])
    writer.close()
    writer = write(resume_at=4)
    with open_run(tmp_path / "run") as run:
        check(run, NAME, [made(step) for step in range(4)])
        again = [made(step + 100) for step in (4, 5)]
        for one in again:
            writer.append(one.step, [], [one])
        writer.close()
        check(run, NAME, [*(made(step) for step in range(4)), *again])
        check(run, "weight/histogram", [made(step) for step in range(4)])


def test_scopes_that_only_histograms_have_survive_a_resume(tmp_path, write):
    writer = write()
    append_all(writer, training(3))
    writer.append(3, [], [made(3, ("a", "b"))])
    writer.append(8, [Block(8, 0.0, "late/metric", ("only", "here"), np.zeros(2, np.float32))], [made(8, ("late",))])
    writer.close()
    writer = write(resume_at=8)
    writer.append(8, [], [made(8, ("c", "d", "e")), made(8, ("a", "b"))])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.distributions() == {NAME: ("a", "b", "c", "d", "e")}
        assert run.histograms(NAME, "b").steps.tolist() == [3, 8]
        assert np.array_equal(run.histograms(NAME, "d").counts[0], made(8, ("c", "d", "e")).counts[1])


def test_scopes_that_change_during_a_run_make_one_series(tmp_path, write):
    writer = write()
    for step, scopes in enumerate([("a", "b"), ("b", "c"), ("c",), ("a", "b")]):
        writer.append(step, [], [made(step, scopes)])
    writer.close()
    with open_run(tmp_path / "run") as run:
        found = run.histograms(NAME, "b")
        assert found.steps.tolist() == [0, 1, 3]
        assert np.array_equal(found.counts[1], made(1, ("b", "c")).counts[0])
        assert run.distributions() == {NAME: ("a", "b", "c")}


def test_a_tensor_without_a_histogram_at_a_step_is_left_out_there(tmp_path, write):
    writer = write()
    for step in range(3):
        one = made(step, ("a", "b"))
        if step == 1:
            one.counts[0], one.zeros[0] = 0, 0
        writer.append(step, [], [one])
    writer.close()
    with open_run(tmp_path / "run") as run:
        assert run.histograms(NAME, "a").steps.tolist() == [0, 2]
        assert run.histograms(NAME, "b").steps.tolist() == [0, 1, 2]


def test_what_is_not_there_is_named_with_what_is(tmp_path, write):
    writer = write()
    writer.append(0, [], [made(0, ("a.weight",))])
    writer.close()
    with open_run(tmp_path / "run") as run:
        with pytest.raises(
            UnknownSeriesError, match="no metric with histograms 'gradient/histo'; did you mean 'gradie"
        ):
            run.histograms("gradient/histo", "a.weight")
        with pytest.raises(UnknownSeriesError, match=r"no scope of gradient/histogram 'b.weight'; did you mean 'a.wei"):
            run.histograms(NAME, "b.weight")


def test_counts_of_a_wrong_shape_are_refused(write):
    one = made(0, ("a", "b"))
    wrong = Distribution(0, 0.0, NAME, ("a", "b"), one.counts[:1], one.zeros)
    with pytest.raises(ValueError, match=r"has counts of shape \(1, 2, 64\) and zeros of shape \(2,\) for 2 scopes"):
        write().append(0, [], [wrong])


def test_damage_is_told(tmp_path, write):
    writer = write()
    writer.append(0, [], [made(0)])
    writer.close()
    whole = read_bodies(tmp_path / "run")[0]
    flipped = [whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :] for at in (0, 1, 2, 3, 10, len(whole) // 2)]
    for body in (
        *(b"no blob", b"", b"x\x9cno zlib", first_blob(made(0, ("a",))), "text", whole[:-1], whole + b"\0", *flipped),
        packed(b"\x01\x00\x02\x02", bytes(7 * 2)),  # of fewer scopes than it stands for
    ):
        change(tmp_path / "run", "UPDATE distributions SET body = ?", body)
        with open_run(tmp_path / "run") as run, pytest.raises(RunError, match="a histogram is damaged"):
            run.histograms(NAME, SCOPES[0])
    change(tmp_path / "run", "UPDATE distributions SET body = ?", whole)
    for count in (len(SCOPES) - 1, len(SCOPES) + 1, 1 << 60):
        change(tmp_path / "run", "UPDATE distributions SET count = ?", count)
        with open_run(tmp_path / "run") as run, pytest.raises(RunError, match="a histogram is damaged"):
            run.histograms(NAME, SCOPES[0])


def test_histograms_of_format_1_are_read_and_the_run_goes_on_in_format_2(tmp_path, write):
    writer = write()
    for step in range(4):
        writer.append(step, [], [made(step)])
    writer.close()
    path = tmp_path / "run"
    for step in range(4):
        change(
            path,
            "UPDATE distributions SET first = 0, count = 150, body = ? WHERE step = ?",
            first_blob(made(step)),
            step,
        )
    change(path, "PRAGMA user_version = 1")
    description = path / "run.json"
    description.write_text(description.read_text().replace('"format": 2', '"format": 1'))
    with open_run(path) as run:
        check(run, NAME, [made(step) for step in range(4)])
    writer = write(resume_at=3)
    for step in (3, 4):
        writer.append(step, [], [made(step)])
    writer.close()
    with open_run(path) as run:
        check(run, NAME, [made(step) for step in range(5)])
    assert '"format": 2' in description.read_text()
    assert read(path, "PRAGMA user_version") == [(2,)]


def test_counts_may_be_written_to_once_they_were_handed_over(tmp_path, write):
    writer = write()
    one = made(0)
    writer.append(0, [], [one])
    one.counts[:] = 7
    one.zeros[:] = 7
    writer.close()
    with open_run(tmp_path / "run") as run:
        check(run, NAME, [made(0)])


def test_a_metric_without_scopes_has_no_histograms(tmp_path, write):
    writer = write()
    writer.append(0, [], [made(0, ()), made(0)])
    writer.close()
    with open_run(tmp_path / "run") as run:
        check(run, NAME, [made(0)])


def test_a_run_of_an_older_version_has_no_histograms_and_can_be_resumed(tmp_path, write):
    append_all(writer := write(), training(5))
    writer.close()
    connection = sqlite3.connect(tmp_path / "run" / "run.db")
    connection.execute("DROP TABLE distributions")
    connection.close()
    with open_run(tmp_path / "run") as run:
        assert run.distributions() == {}
    writer = write(resume_at=5)
    writer.append(5, [], [made(5)])
    writer.close()
    with open_run(tmp_path / "run") as run:
        check(run, NAME, [made(5)])


@given(st.integers(1, 130), st.integers(0, 63), st.integers(1, 64), st.sampled_from([1, 200, 60_000, 2**31, 2**50]))
@settings(max_examples=60, deadline=None)
def test_any_counts_come_back(num_scopes, lowest, width, largest):
    random = np.random.default_rng(num_scopes)
    counts = np.zeros((num_scopes, 2, 64), np.int64)
    used = slice(lowest, min(64, lowest + width))
    counts[:, :, used] = random.integers(0, largest + 1, counts[:, :, used].shape)
    zeros = random.integers(0, largest + 1, num_scopes)
    one = Distribution(0, 0.0, NAME, tuple(map(str, range(num_scopes))), counts, zeros)
    seen = 0
    for first, count, header, plain in bands(one):
        for place in range(count):
            found, its_zeros = unpacked(packed(header, bytes(plain)), count, place)
            assert np.array_equal(found, counts[first + place])
            assert its_zeros == zeros[first + place]
            seen += 1
    assert seen == num_scopes


def test_a_histogram_takes_tens_of_bytes_on_disk(tmp_path, write):
    writer = write()
    for step in range(40):
        writer.append(step, [], [made(step)])
    writer.close()
    empty = RunWriter(tmp_path / "empty", info=RunInfo(), config={})
    empty.close()
    size = (tmp_path / "run" / "run.db").stat().st_size - (tmp_path / "empty" / "run.db").stat().st_size
    assert size / (40 * len(SCOPES)) < 60
