"""Rules about tasks: which ratio is how serious, who is named, what is advised, and what is left in peace."""

import math

import pytest

from forewarn.types import Severity
from tests.judge.rules.runs import Run

PAIR = "pointer/type"


def run_of(ratio, readings=12, weights=(1.0, 1.0), left=(1.0, 1.0)):
    run = Run("T101", "T102")
    for _ in range(readings):
        run.feed(
            {
                "task/weight": dict(zip(("pointer", "type"), weights, strict=True)),
                "task/remaining": dict(zip(("pointer", "type"), left, strict=True)),
                "task/ratio": {PAIR: ratio},
            }
        )
    return run


@pytest.mark.parametrize(
    ("ratio", "code", "severity"),
    [
        (1.0, None, None), (1.9, None, None), (0.55, None, None),
        (2.5, "T101", Severity.INFO), (0.4, "T101", Severity.INFO),
        (4.0, "T101", Severity.WARNING), (0.25, "T101", Severity.WARNING),
        (6.0, "T102", Severity.CRITICAL), (0.15, "T102", Severity.CRITICAL),
        (math.inf, "T102", Severity.CRITICAL), (0.0, "T102", Severity.CRITICAL), (math.nan, None, None),
    ],
)  # fmt: skip
def test_severity_follows_the_ratio_either_way_round(ratio, code, severity):
    alerts = run_of(ratio).ledger.alerts
    assert [(alert.code, alert.severity) for alert in alerts] == ([(code, severity)] if code else [])


@pytest.mark.parametrize(("ratio", "dominating", "starved"), [(40.0, "pointer", "type"), (0.025, "type", "pointer")])
def test_a_collapse_names_both_tasks_and_advises_weights_with_numbers(ratio, dominating, starved):
    (alert,) = run_of(ratio, weights=(2.0, 2.0)).ledger.alerts
    assert alert.finding.evidence["dominating"] == dominating
    assert alert.finding.evidence["starved"] == starved
    raised, lowered = alert.remedies[:2]
    assert str(raised) == f"raise_task_weight 2 → 16 task {starved} by × 8"
    assert str(lowered) == f"lower_task_weight 2 → 0.25 task {dominating} by × 0.125"
    assert "alpha" not in " ".join(f"{one} {one.why}" for one in alert.remedies)


def test_a_small_imbalance_is_mended_by_a_factor_of_two():
    (alert,) = run_of(3.5).ledger.alerts
    assert str(alert.remedies[0]) == "raise_task_weight 1 → 2 task type by × 2"
    assert str(alert.remedies[1]) == "lower_task_weight 1 → 0.5 task pointer by × 0.5"


@pytest.mark.parametrize("left", [(0.9, 0.3), (0.02, 0.1)], ids=["ahead of the other", "solved like the other"])
def test_a_task_that_has_learned_its_part_is_not_starved(left):
    assert run_of(60.0, left=left).ledger.alerts == ()


def test_a_strong_task_that_has_learned_does_not_excuse_the_weak_one():
    assert run_of(60.0, left=(0.05, 0.95)).codes == {"T102"}


def test_a_single_wild_batch_and_too_few_readings_are_nothing():
    run = run_of(1.0, readings=15)
    run.feed({"task/ratio": {PAIR: 500.0}})
    run.feed({"task/ratio": {PAIR: 1.0}})
    assert run.ledger.alerts == ()
    assert run_of(60.0, readings=10).ledger.alerts == (), "nine readings and one check"


@pytest.mark.parametrize("without", [math.inf, 0.0, math.nan])
@pytest.mark.parametrize("every", [2, 7])
def test_batches_without_labels_are_left_out_while_others_have_a_gradient(without, every):
    for ratio, codes in ((1.0, set()), (60.0, {"T102"})):
        run = Run("T101", "T102")
        for reading in range(40):
            run.feed({"task/ratio": {PAIR: without if reading % every == 0 else ratio}})
        assert run.codes == codes


def test_a_task_that_is_satisfied_is_not_starved():
    assert run_of(math.inf, left=(0.7, 0.0)).ledger.alerts == ()
    assert run_of(0.0, left=(0.0, 0.7)).ledger.alerts == ()


def test_weights_on_their_way_are_left_in_peace_and_those_that_go_astray_are_not():
    for change, codes in ((1.2, set()), (1.0, {"T102"}), (0.8, {"T102"})):
        run, weight = Run("T101", "T102"), 0.001
        for _ in range(14):
            run.feed({"task/weight": {"pointer": 1.0, "type": weight}, "task/ratio": {PAIR: 200.0}})
            weight *= change
        assert run.codes == codes


def conflict(cosines):
    run = Run("T103")
    for cosine in cosines:
        run.feed({"task/ratio": {PAIR: 3.0}, "task/cosine": {PAIR: cosine}})
    return run


def test_a_sustained_conflict_is_information_or_a_warning_by_its_depth():
    (mild,) = conflict([-0.5] * 25).ledger.alerts
    (deep,) = conflict([-0.8] * 25).ledger.alerts
    assert (mild.severity, deep.severity) == (Severity.INFO, Severity.WARNING)
    assert [one.action for one in deep.remedies] == ["separate_layers", "lower_task_weight", "project_gradients"]
    assert deep.finding.evidence["dominating"] == "pointer"


def test_cosines_that_change_their_sign_are_no_conflict():
    assert conflict([-0.9, 0.3, -0.9] * 15).ledger.alerts == ()
    assert conflict([-0.15] * 60).ledger.alerts == ()
    assert conflict([-0.9] * 19).ledger.alerts == ()
