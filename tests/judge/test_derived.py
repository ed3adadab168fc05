"""What follows from readings by the bounds of rules: made anew whenever a run is judged."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.config import Config
from forewarn.judge.derived import FrozenTracker, derivations
from forewarn.judge.diagnosis import replay
from forewarn.judge.history import Derivation
from forewarn.metrics import find
from forewarn.types import FrozenCause
from tests.judge.rules.runs import Run, block

MOVING, ON_PURPOSE, ORPHAN, OFF, NO_GRADIENT, ZERO_GRADIENT, ZERO_LR, NOT_STEPPED, SKIPPED, ROUNDED = FrozenCause
STEPS = 12
HALTED_AT = 4
RATIO = 1e-4
"""Update ratio of a tensor of the run below that barely moves."""


@pytest.fixture
def run(watch, tmp_path):
    """A stored run in which a layer is turned off at step 4, another barely moves, and the validation loss stalls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    slow = RATIO * model[2].weight.norm().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = watch(model, optimizer, run=tmp_path / "run")
    for step in range(STEPS):
        if step == HALTED_AT:
            model[0].requires_grad_(False)
        loss = model(torch.linspace(-1, 1, 8).view(2, 4)).square().mean()
        loss.backward()
        with torch.no_grad():
            model[2].weight.grad *= slow / 0.05 / model[2].weight.grad.norm()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        if step % 3 == 2:
            monitor.end_epoch(val_loss=2.0 - 0.05 * step)
    monitor.close()
    with forewarn.open_run(tmp_path / "run") as stored:
        yield stored


def judged(run, **thresholds):
    return replay(run, Config.from_dict({"thresholds": thresholds}).rule_set())


def derived(run, name, scope="", **thresholds):
    """The readings of a derived metric when the run is judged by these bounds."""
    history = Config.from_dict({"thresholds": thresholds}).rule_set().history()
    for _, blocks in run.steps():
        history.append(blocks)
    return history.series(name, scope).values.tolist()


def frozen(diagnosis):
    return {alert.scope: alert for alert in diagnosis.alerts if alert.name == "frozen-weight"}


def test_each_is_of_the_catalogue_and_follows_from_what_is_measured():
    made = derivations(Config().rule_set())
    gives = [name for one in made for name in one.gives]
    assert len(set(gives)) == len(gives)
    assert all(find(name).name == name for name in gives)
    assert not {name for one in made for name in one.sources} & set(gives)


def test_what_was_stored_is_what_the_same_bounds_give_again(run):
    history = Config.from_stored(run.config).rule_set().history()
    seen = set()
    for _, stored in run.steps():
        again = history.append(stored)
        assert [one.name for one in again] == [one.name for one in stored]
        for before, after in zip(stored, again, strict=True):
            assert before.scopes == after.scopes
            np.testing.assert_array_equal(before.values, after.values)
            seen.add(before.name)
    assert {name for one in derivations(Config().rule_set()) for name in one.gives} <= seen


def test_another_patience_with_frozen_weights_gives_another_answer(run):
    assert frozen(judged(run))["0.weight"].since == HALTED_AT + 2
    assert frozen(judged(run, frozen_weight={"patience": 1}))["0.weight"].since == HALTED_AT
    assert frozen(judged(run, frozen_weight={"patience": STEPS - HALTED_AT}))["0.weight"].since == STEPS - 1
    assert not frozen(judged(run, frozen_weight={"patience": STEPS - HALTED_AT + 1}))


def test_another_ratio_of_frozen_weights_gives_another_answer_and_is_the_bound(run):
    assert set(frozen(judged(run))) == {"0.weight"}
    alert = frozen(judged(run, frozen_weight={"ratio": 2 * RATIO}))["2.weight"]
    assert alert.finding.bound == 2 * RATIO
    assert alert.finding.value == pytest.approx(RATIO, rel=0.05)
    assert alert.finding.evidence["cause"] == "rounded_away"


def test_other_bounds_of_gradients_count_other_tensors(run):
    norms = [sum(block.values < 0.1) for _, blocks in run.steps() for block in blocks if block.name == "gradient/norm"]
    assert derived(run, "monitor/vanishing_count") == [0] * STEPS
    assert derived(run, "monitor/vanishing_count", vanishing_gradient={"tensor_norm": 0.1}) == norms
    assert sum(norms) > 0
    assert derived(run, "monitor/exploding_count") == [0] * STEPS
    small = derived(run, "monitor/exploding_count", exploding_gradient={"warning": 1e-9})
    assert small == [3] * HALTED_AT + [2] * (STEPS - HALTED_AT)


def test_frozen_tensors_are_counted_by_the_bounds_of_the_rule(run):
    assert derived(run, "monitor/frozen_count") == [0] * (HALTED_AT + 2) + [1] * (STEPS - HALTED_AT - 2)
    later = derived(run, "monitor/frozen_count", frozen_weight={"patience": 5})
    assert later == [0] * (HALTED_AT + 4) + [1] * (STEPS - HALTED_AT - 4)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [({}, [0, 0, 0, 0]), ({"change": 0.2}, [0, 0, 1, 1]), ({"change": 0.2, "window": 2}, [0, 1, 1, 1])],
)
def test_another_plateau_of_the_validation_loss_is_told_for_each_epoch(run, bounds, expected):
    assert derived(run, "evaluation/plateau_detected", validation_plateau=bounds) == expected
    assert [epoch.plateau_detected for epoch in judged(run, validation_plateau=bounds).epochs] == expected


def tracked(*checks, patience=3):
    """The causes after checks of one tensor, each whether it was still and what stopped it."""
    tracker, scopes = FrozenTracker(), ("a",)
    return [
        FrozenCause(int(tracker.update(scopes, np.array([still]), np.array([by], np.float32), patience)[0]))
        for still, by in checks
    ]


def test_a_tensor_is_frozen_after_its_patience_by_what_stops_it_now():
    assert tracked(*[(True, ZERO_LR)] * 2, (True, NO_GRADIENT)) == [MOVING, MOVING, NO_GRADIENT]
    assert tracked(*[(True, ZERO_LR)] * 2, (True, MOVING)) == [MOVING, MOVING, ROUNDED]
    assert tracked((True, ZERO_LR), (True, ZERO_LR), (False, ZERO_GRADIENT), (True, ZERO_LR)) == [MOVING] * 4


def test_what_is_frozen_on_purpose_or_an_orphan_is_named_at_once():
    assert tracked((False, ON_PURPOSE), (True, ORPHAN), (False, ORPHAN)) == [ON_PURPOSE, ORPHAN, MOVING]


def test_a_check_at_which_its_optimizer_rests_does_not_count():
    rests = (True, math.nan)
    assert tracked((True, ZERO_LR), rests, rests, (True, ZERO_LR), rests, (True, ZERO_LR)) == [MOVING] * 5 + [ZERO_LR]
    assert tracked((True, ZERO_LR), (True, ZERO_LR), (False, math.nan), (True, ZERO_LR))[-1] is ZERO_LR


def test_an_expert_that_rests_now_and_then_is_not_counted_as_frozen_until_it_has_rested_too_long():
    run = Run("U101")
    idle = {"update/ratio": 0.0, "update/stopped_by": float(ZERO_GRADIENT)}
    busy = {"update/ratio": RATIO, "update/stopped_by": float(MOVING)}
    for check in range(60):
        experts = {"experts.0.weight": busy if check < 20 and check % 2 == 0 else idle, "experts.1.weight": busy}
        run.feed({name: {scope: now[name] for scope, now in experts.items()} for name in idle})
    counts = run.history.series("monitor/frozen_count").values.tolist()
    since = run.ledger.firing[0].since
    assert since > 35
    assert counts == [0.0] * since + [1.0] * (60 - since)


def test_counts_stay_with_their_tensor_when_the_model_gets_another():
    tracker = FrozenTracker()
    zero_lr = np.array([ZERO_LR], np.float32)
    tracker.update(("a",), np.array([True]), zero_lr, 2)
    causes = tracker.update(("b", "a"), np.array([True, True]), np.repeat(zero_lr, 2), 2)
    assert causes.tolist() == [MOVING, ZERO_LR]
    assert tracker.checks == {"a": 2, "b": 1}


def stopped(run, ratio, by):
    run.feed({"update/ratio": ratio, "update/stopped_by": dict.fromkeys(ratio, float(by))})
    return run.history.panel("update/frozen_cause").last.tolist()


@pytest.mark.parametrize("cause", [SKIPPED, NOT_STEPPED])
def test_where_no_optimizer_stepped_nothing_moved_whatever_else_is_known(cause):
    run, ratios = Run("U101"), {"a": math.nan, "b": 1.0}
    by = {"update/stopped_by": {"a": float(OFF), "b": float(cause)}}
    for _ in range(3):
        run.feed({"update/ratio": ratios, **by})
    assert run.history.panel("update/frozen_cause").last.tolist() == [OFF, cause]


def test_counting_goes_on_where_a_saved_state_left_off():
    first, second = Run("U101"), Run("U101")
    for _ in range(2):
        assert stopped(first, {"a": 0.0}, ZERO_LR) == [MOVING]
    second.history.load_state_dict(first.history.state_dict())
    second.at = first.at
    assert stopped(second, {"a": 0.0}, ZERO_LR) == [ZERO_LR]


def test_a_run_without_what_it_would_follow_from_keeps_what_was_stored():
    run = Run("U101", config=Config.from_dict({"thresholds": {"frozen_weight": {"patience": 50}}}))
    run.feed({"update/ratio": {"a": 0.0}, "update/frozen_cause": {"a": float(ZERO_LR)}, "monitor/frozen_count": 1.0})
    assert run.codes == {"U101"}
    assert run.history.series("monitor/frozen_count").last == 1


def test_derived_readings_come_after_their_sources_and_replace_stored_ones():
    history = Config().rule_set().history()
    stored = {"gradient/norm": {"a": 1e-9}, "monitor/vanishing_count": 7.0, "gradient/global_norm": 1.0}
    joined = history.append([block(0, name, reading) for name, reading in stored.items()])
    assert [one.name for one in joined] == [
        "gradient/norm", "monitor/vanishing_count", "monitor/exploding_count", "gradient/global_norm",
    ]  # fmt: skip
    assert history.series("monitor/vanishing_count").values.tolist() == [1]


def test_a_derivation_that_raises_is_switched_off_and_said(monkeypatch, caplog):
    run = Run()

    def explode(self, history, blocks):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(type(run.history._derivations[1]), "derive", explode)
    for _ in range(3):
        run.feed({"update/ratio": {"a": 0.0}, "update/stopped_by": {"a": 2.0}, "gradient/norm": {"a": 1.0}})
    assert [(alert.name, alert.scope) for alert in run.ledger.alerts] == [("rule-failed", "frozen-weight")]
    assert run.history.series("monitor/exploding_count").values.tolist() == [0, 0, 0]
    assert caplog.text.count("RuntimeError: broken on purpose") == 1


def test_a_derivation_says_what_it_derives():
    with pytest.raises(NotImplementedError):
        Derivation().derive(Config().rule_set().history(), {})
