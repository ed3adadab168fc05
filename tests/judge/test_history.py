"""The history: what rules look at."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forewarn.judge.history import History
from forewarn.thresholds.spike import Spike
from forewarn.types import Block


def block(step, name, values, scopes=("",)):
    return Block(step, float(step), name, scopes, np.array(values, np.float32).reshape(len(scopes)))


@given(st.lists(st.floats(width=32), max_size=80), st.integers(1, 20))
def test_it_keeps_the_last_readings_exactly_as_stored(values, window):
    history = History(window=window)
    for step, value in enumerate(values):
        history.append([block(step, "train/loss", [value])])
    series = history.series("train/loss")
    expected = np.array(values, np.float32)[-window:]
    assert np.array_equal(series.values, expected, equal_nan=True)
    assert list(series.steps) == list(range(len(values)))[-window:]


def test_what_was_never_read_is_empty():
    history = History()
    assert "train/loss" not in history
    assert len(history.panel("train/loss")) == 0
    assert len(history.series("train/loss")) == 0


def test_per_tensor_metrics_are_kept_for_fewer_readings_than_those_of_the_run():
    history = History(window=50, detail_window=16)
    for step in range(100):
        history.append([
            block(step, "train/loss", [step]), block(step, "train/lr", [1, 2], ("0", "1")),
            block(step, "gradient/norm", [1, 2], ("a", "b")),
        ])  # fmt: skip
    assert len(history.panel("train/loss")) == 50
    assert len(history.panel("train/lr")) == 50, "the lr of each group is about the run"
    assert len(history.panel("gradient/norm")) == 16
    assert history.names() == ["gradient/norm", "train/loss", "train/lr"]


def test_scopes_may_come_late_be_missing_and_change_their_order():
    history = History()
    history.append([block(0, "task/loss", [1.0, 2.0], ("a", "b"))])
    history.append([block(1, "task/loss", [4.0, 3.0], ("c", "a"))])
    history.append([block(2, "task/loss", [5.0], ("b",))])
    panel = history.panel("task/loss")
    assert panel.scopes == ("a", "b", "c")
    expected = [[1, 2, np.nan], [3, np.nan, 4], [np.nan, 5, np.nan]]
    assert np.array_equal(panel.values, np.array(expected, np.float32), equal_nan=True)


def test_each_reading_joins_the_level_once_whoever_asks():
    history, asked_often = History(), History()
    rng = np.random.default_rng(0)
    for step in range(200):
        reading = [block(step, "train/loss", [float(np.exp(0.1 * rng.normal())) * (9 if step % 50 == 49 else 1)])]
        history.append(reading)
        asked_often.append(reading)
        one = history.series("train/loss").deviation(Spike())
        for _ in range(3):
            other = asked_often.series("train/loss").deviation(Spike())
        assert np.array_equal(one, other, equal_nan=True)


def test_a_level_asked_for_late_knows_the_kept_past():
    history = History()
    for step in range(100):
        history.append([block(step, "train/loss", [1.0])])
    history.append([block(100, "train/loss", [9.0])])
    assert history.series("train/loss").deviation(Spike()).outlier


def test_what_fell_out_of_the_ring_before_a_level_was_asked_for_does_not_join_it_later():
    history, asked_often = History(window=40), History(window=40)
    for step in range(300):
        reading = [block(step, "train/loss", [1.0 + 0.01 * (step % 7)])]
        history.append(reading)
        asked_often.append(reading)
        if step < 60 or step > 250:
            history.series("train/loss").deviation(Spike())
        asked_often.series("train/loss").deviation(Spike())
    [level], [other] = (each._rings["train/loss"].baselines.values() for each in (history, asked_often))
    assert level.seen == other.seen == 300


def test_a_state_of_an_earlier_version_finds_its_levels_anew():
    history, resumed = History(), History()
    for step in range(100):
        history.append([block(step, "train/loss", [1.0])])
        history.series("train/loss").deviation(Spike())
    state = history.state_dict()
    for plain in state["train/loss"]["baselines"]:
        del plain["scope"]
    resumed.load_state_dict(state)
    resumed.append([block(100, "train/loss", [9.0])])
    assert resumed.series("train/loss").deviation(Spike()).outlier


def test_a_scope_that_appears_later_has_a_level_of_its_own():
    history = History()
    for step in range(64):
        history.append([block(step, "gradient/norm", [1.0], ("a",))])
        history.series("gradient/norm", "a").deviation(Spike())
    history.append([block(64, "gradient/norm", [9.0, 9.0], ("a", "b"))])
    assert [history.series("gradient/norm", scope).deviation(Spike()).outlier for scope in "ab"] == [True, False]


def test_what_was_looked_at_is_looked_at_anew_after_the_next_reading():
    history = History()
    for step in range(3):
        history.append([block(step, "train/loss", [step])])
        assert history.panel("train/loss") is history.panel("train/loss")
        assert history.series("train/loss").last == history.panel("train/loss").at == step


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 149))
def test_a_resumed_history_gives_the_same_verdicts(seed, saved_at):
    rng = np.random.default_rng(seed)
    values = np.exp(0.3 * rng.normal(size=(150, 2))) * rng.choice([1.0, 1.0, 1.0, 30.0, np.nan], size=(150, 2))
    straight, halted = History(detail_window=32), History(detail_window=32)
    for step, row in enumerate(values):
        if step == saved_at:
            state = halted.state_dict()
            halted = History(detail_window=32)
            halted.load_state_dict(state)
        for history in (straight, halted):
            history.append([block(step, "gradient/norm", row, ("a", "b"))])
        for scope in "ab":
            one, other = (history.series("gradient/norm", scope).deviation(Spike()) for history in (straight, halted))
            assert np.array_equal(one, other, equal_nan=True)
    assert np.array_equal(straight.panel("gradient/norm").values, halted.panel("gradient/norm").values, equal_nan=True)


def test_a_saved_state_is_not_changed_by_going_on():
    history = History()
    history.append([block(0, "train/loss", [1.0])])
    state = history.state_dict()
    history.append([block(1, "train/loss", [2.0])])
    assert list(state["train/loss"]["values"].ravel()) == [1.0]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_even_the_smallest_window_slides(window):
    history = History(window=window)
    for step in range(10):
        history.append([block(step, "train/loss", [step])])
    assert list(history.series("train/loss").values) == list(range(10))[-window:]


def test_what_is_read_on_every_step_of_the_run_is_kept_long_whether_a_rule_looks_at_it_or_not():
    history = History(window=50, detail_window=32, judged=[])
    read = {
        "train/lr_plan": (50, ("0", "1")), "train/accuracy": (50, ("a", "b")), "speed/step_seconds": (50, ("",)),
        "evaluation/epoch": (50, ("",)), "weight/global_norm": (32, ("",)), "monitor/overhead_share": (32, ("",)),
        "task/loss": (8, ("a", "b")), "attention/entropy": (8, ("h",)),
    }  # fmt: skip
    for step in range(100):
        history.append([block(step, name, [step] * len(scopes), scopes) for name, (_, scopes) in read.items()])
    assert {name: len(history.panel(name)) for name in read} == {name: kept for name, (kept, _) in read.items()}


def test_of_what_no_rule_looks_at_only_the_last_readings_are_kept():
    history = History(window=50, detail_window=32, judged=["gradient/norm", "train/loss", "*_metric/*"])
    read = [
        ("gradient/norm", ("a",)),
        ("gradient/std", ("a",)),
        ("monitor/grad_median", ("",)),
        ("user/score", ("",)),
        ("gradient_metric/mine", ("a",)),
    ]
    for step in range(100):
        for name, scopes in read:
            history.append([Block(step, 0.0, name, scopes, np.array([step], np.float32))])
    lengths = {name: len(history.panel(name)) for name in history.names()}
    kept = {"gradient/norm": 32, "gradient/std": 8, "gradient_metric/mine": 32}
    assert lengths == {**kept, "monitor/grad_median": 32, "user/score": 50}
    assert history.series("gradient/std", "a").values.tolist() == list(range(92, 100))
