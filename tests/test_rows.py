"""A step without detail as one row of numbers: whoever gets it does the same as with its blocks."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import forewarn
from forewarn.config import Config
from forewarn.judge.forecast import LossCurve
from forewarn.judge.history import History
from forewarn.judge.judgement import Judge
from forewarn.judge.ledger import Ledger
from forewarn.measure.probe import Reading
from forewarn.measure.recording import recorded
from forewarn.measure.transfer import Transfer
from forewarn.rows import Row, RowLayout, Sheet
from forewarn.store.writer import RunWriter
from forewarn.types import Distribution, RunInfo

USUAL = RowLayout([
    ("train/lr", ("0", "1")), ("update/optimizer_steps", ("",)), ("train/loss", ("",)), ("gradient/global_norm", ("",)),
])  # fmt: skip
WITH_LEVEL = RowLayout([("train/lr", ("0", "1")), ("train/loss", ("",)), ("train/loss_level", ("",))])
ONE_GROUP = RowLayout([("train/lr", ("0",)), ("train/loss", ("",))])


def row(step, layout, numbers):
    return Row(step, float(step), layout, numbers)


def test_a_row_holds_its_numbers_as_they_are_stored():
    numbers = [0.1, 1e-3, True, 1e300, -math.inf]
    blocks = list(row(7, USUAL, numbers))
    assert [(block.name, block.scopes, block.step) for block in blocks] == [
        (name, scopes, 7) for name, scopes in zip(USUAL.names, USUAL.scopes, strict=True)
    ]
    with np.errstate(over="ignore"):
        expected = np.array(numbers, np.float64).astype(np.float32)
    assert np.array_equal(np.concatenate([block.values for block in blocks]), expected)
    assert row(7, USUAL, numbers).numbers == expected.tolist()
    assert row(7, USUAL, numbers).body == expected.astype("<f4").tobytes()


@pytest.mark.parametrize("numbers", [[1.0] * 4, [1.0] * 6, [1.0, 1.0, 1.0, 1.0, "1"], [1.0, 1.0, 1.0, 1.0, [1.0]]])
def test_what_is_not_one_number_per_scope_is_no_row(numbers):
    with pytest.raises((TypeError, ValueError)):
        row(0, USUAL, numbers)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0.5, 2.0)), min_size=1, max_size=200), st.integers(8, 40))
def test_rows_and_blocks_leave_the_same_history(steps, window):
    by_row, by_block = History(window, 8), History(window, 8)
    for step, (what, value) in enumerate(steps):
        layout = {0: WITH_LEVEL, 1: ONE_GROUP}.get(what, USUAL)
        added = row(step, layout, [value * (place + 1) for place in range(layout.starts[-1])])
        for history, readings in ((by_row, added), (by_block, added.blocks)):
            history.append(readings)
            if what == 5:
                assert history.series("train/loss").last == np.float32(added.numbers[layout.whole["train/loss"]])
            if what == 4:
                assert history.newest("train/lr").last == history.panel("train/lr").last.tolist()
                assert history.newest("train/lr").peak >= np.nanmax(history.panel("train/lr").values)
    states = by_row.state_dict(), by_block.state_dict()
    assert str(states[0]) == str(states[1])


def test_rows_are_judged_like_blocks():
    rng = np.random.default_rng(1)
    loss, norm = 2.0 * np.exp(0.1 * rng.normal(size=3000)), np.exp(0.5 * rng.normal(size=3000))
    loss[rng.integers(0, 3000, 20)] = rng.choice([np.nan, np.inf, 50.0], 20)
    norm[rng.integers(0, 3000, 20)] = rng.choice([np.nan, 100.0, 101.0, 5000.0], 20)
    norm[1500:1600] = 1e-4
    stepped = np.where((np.arange(3000) % 700) < 690, 1.0, 0.0)
    rate = np.where(np.arange(3000) < 1200, 1e-3, np.where(np.arange(3000) < 1400, 5e-2, 1e-7))
    info = RunInfo(hyperparameters={"total_steps": 3000}, groups=({"lr": 1e-3}, {"lr": 1e-3}))

    def told(as_blocks):
        rule_set = Config().rule_set()
        history, judge, ledger = rule_set.history(info), Judge(rule_set, info), Ledger(rule_set.rules)
        curve = LossCurve()
        for step in range(3000):
            added = row(step, USUAL, [rate[step], 1e-3, stepped[step], loss[step], norm[step]])
            readings = history.append(added.blocks if as_blocks else added)
            curve.take(step, readings)
            ledger.update(judge(step, history, readings), history, info)
        return (
            repr(ledger.alerts),
            str(history.state_dict()),
            curve.state_dict(),
            {alert.code for alert in ledger.alerts},
        )

    by_row, by_block = told(False), told(True)
    assert {"L101", "L102", "G102", "U105"} <= by_row[-1]
    assert by_row == by_block


def test_a_gate_that_raises_switches_its_rule_off():
    rule_set = Config().rule_set()
    history, judge = rule_set.history(), Judge(rule_set, RunInfo())

    def broken(step, value, history):
        raise RuntimeError("broken")

    judge._gates["L102"] = broken
    findings = judge(0, history, history.append(row(0, USUAL, [1e-3, 1e-3, 1.0, 2.0, 1.0]))).findings
    assert [(finding.code, finding.scope) for finding in findings] == [("X102", "loss-spike")]
    assert judge.failed == {"L102"}


def test_stored_rows_are_read_back_like_blocks(tmp_path):
    for name in ("rows", "blocks"):
        writer = RunWriter(tmp_path / name, info=RunInfo(), config={})
        for step in range(40):
            layout = WITH_LEVEL if step % 8 == 0 else USUAL
            added = row(step, layout, np.random.default_rng(step).normal(size=layout.starts[-1]).tolist())
            writer.append(step, added if name == "rows" else added.blocks)
        writer.close()
    runs = [forewarn.open_run(tmp_path / name) for name in ("rows", "blocks")]
    both = [
        [(step, [(block.name, block.scopes, block.time, block.values.tolist()) for block in blocks])
         for step, blocks in run.steps()]
        for run in runs
    ]  # fmt: skip
    assert both[0] == both[1]
    assert len(both[0]) == 40


MEASURED = RowLayout([
    ("train/loss", ("",)), ("gradient/norm", ("a", "b", "c")), ("update/ratio", ("a", "b", "c")),
    ("update/stopped_by", ("a", "b", "c")), ("weight/norm", ("a", "b", "c")),
])  # fmt: skip
FEWER = RowLayout([("train/loss", ("",)), ("gradient/norm", ("a", "c")), ("weight/norm", ("a", "c", "d"))])


def sheet(step, layout, rng):
    values = np.exp(rng.normal(size=layout.starts[-1])).astype(np.float32)
    if layout is MEASURED:
        values[7:10] = rng.integers(0, 2, 3)
    return Sheet(step, float(step), layout, values)


def test_sheets_and_blocks_leave_the_same_history_and_derive_the_same():
    by_sheet, by_block = Config().rule_set().history(), Config().rule_set().history()
    rng = np.random.default_rng(2)
    for step in range(200):
        added = sheet(step, FEWER if step % 7 == 3 else MEASURED, rng)
        joined = by_sheet.append(added)
        expected = by_block.append(added.blocks)
        assert [(block.name, block.scopes, block.values.tolist()) for block in joined] == [
            (block.name, block.scopes, block.values.tolist()) for block in expected
        ]
        assert [joined[place].name for place in range(-len(joined), 0)] == [block.name for block in expected]
        if step % 5 == 0:
            light = row(step, USUAL, [1e-3, 1e-3, 1.0, 2.0, float(step)])
            by_sheet.append(light)
            by_block.append(light.blocks)
    assert "update/frozen_cause" in by_sheet
    assert str(by_sheet.state_dict()) == str(by_block.state_dict())


def test_a_derivation_that_fails_on_a_sheet_is_switched_off_like_on_blocks(monkeypatch):
    monkeypatch.setattr("forewarn.judge.derived.GradientCounts.derive", lambda *_: 1 / 0)
    monkeypatch.setattr("forewarn.judge.derived.FrozenCauses.derive", lambda *_: 1 / 0)
    by_sheet, by_block = Config().rule_set().history(), Config().rule_set().history()
    for step in range(2):
        added = sheet(step, MEASURED, np.random.default_rng(step))
        joined, expected = by_sheet.append(added), by_block.append(added.blocks)
        assert [(block.name, block.scopes) for block in joined] == [(block.name, block.scopes) for block in expected]
        assert ("monitor/rule_failed" in {block.name for block in joined}) == (step == 0)


def test_sheets_are_judged_like_blocks():
    rng = np.random.default_rng(3)
    steps = [sheet(step, MEASURED, rng) for step in range(300)]
    info = RunInfo(groups=({"lr": 1e-3},))

    def told(as_blocks):
        rule_set = Config().rule_set()
        history, judge, ledger = rule_set.history(info), Judge(rule_set, info), Ledger(rule_set.rules)
        curve = LossCurve()
        for step, added in enumerate(steps):
            readings = history.append(added.blocks if as_blocks else added)
            curve.take(step, readings)
            ledger.update(judge(step, history, readings), history, info)
        return repr(ledger.alerts), curve.state_dict(), {alert.code for alert in ledger.alerts}

    assert told(False) == told(True)
    assert told(False)[-1]


def test_stored_sheets_are_read_back_like_blocks(tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (3, 2, 64))
    for name in ("sheets", "blocks"):
        rng = np.random.default_rng(1)
        writer = RunWriter(tmp_path / name, info=RunInfo(), config={})
        for step in range(30):
            added = sheet(step, FEWER if step % 4 == 0 else MEASURED, rng)
            histograms = [
                Distribution(step, float(step), "gradient/histogram", ("a", "b", "c"), counts, counts[:, 0, 0])
            ]
            writer.append(step, added if name == "sheets" else added.blocks, histograms if step % 3 == 0 else [])
            light = row(step, USUAL, [1e-3, 1e-3, 1.0, 2.0, float(step)])
            writer.append(step, light if name == "sheets" else light.blocks)
        writer.close()
    runs = [forewarn.open_run(tmp_path / name) for name in ("sheets", "blocks")]
    both = [
        [(step, [(block.name, block.scopes, block.time, block.values.tolist()) for block in blocks])
         for step, blocks in run.steps()]
        for run in runs
    ]  # fmt: skip
    assert both[0] == both[1]
    stored = [run.histograms("gradient/histogram", "b") for run in runs]
    assert stored[0].steps.tolist() == stored[1].steps.tolist() == list(range(0, 30, 3))
    assert np.array_equal(stored[0].counts, stored[1].counts)


def test_readings_that_fit_make_a_sheet_and_others_make_blocks():
    fitting = [
        Reading("train/loss", ("",), 2.5), Reading("gradient/norm", ("a", "b"), np.array([1e300, 0.1])),
        Reading("gain/mean", ("",), np.float64(3.0)), Reading("train/lr", ("0", "1"), [1, 2.0]),
    ]  # fmt: skip
    blocks, _ = recorded(1, 2.0, fitting)
    assert isinstance(blocks, Sheet)
    assert [block.values.tolist() for block in blocks] == [[2.5], [math.inf, np.float32(0.1)], [3.0], [1.0, 2.0]]
    twice, _ = recorded(1, 2.0, [*fitting, Reading("gradient/norm", ("b", "c"), np.array([5.0, 6.0]))])
    assert [block.values.tolist() for block in twice if block.name == "gradient/norm"] == [[math.inf, 5.0, 6.0]]
    with pytest.raises(ValueError, match="reshape"):
        recorded(1, 2.0, [Reading("gradient/norm", ("a", "b"), np.array([1.0]))])


class Late(Transfer):
    """Keeps the newest step back, as an accelerator does."""

    is_empty = False

    def receive(self, wait=False):
        newest = [] if wait else [self._queue.pop()]
        received = super().receive(wait)
        self._queue.extend(newest)
        return received


def test_steps_without_detail_that_arrive_late_are_those_that_are_there_at_once(watch):
    def run(transfer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = watch(model, optimizer, every=lambda step: step == 5)
        monitor._transfer = transfer
        for _ in range(50):
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log("own/number", torch.tensor(2.0))
            monitor.step(loss, accuracy=0.5)
        monitor.close()
        with forewarn.open_run(monitor._writer.path) as stored:
            wanted = ("train/loss", "train/loss_ema", "train/loss_level", "train/lr", "gradient/global_norm",
                      "update/optimizer_steps", "own/number", "train/accuracy")  # fmt: skip
            series = [stored.series(name, scope) for name in wanted for scope in stored.scopes(name)]
            return [(one.steps.tolist(), one.values.tolist()) for one in series]

    at_once, late = run(Transfer()), run(Late())
    assert len(at_once) == 8
    assert at_once == late


def test_a_step_without_readings_is_no_row_so_that_its_run_can_be_read():
    assert recorded(3, 1.0, []) == ([], [])
