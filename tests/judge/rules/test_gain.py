"""Rules about gradients over the depth: what is allowed follows from the depth, and noise between batches is quiet."""

import numpy as np
import pytest

from forewarn.judge.rules.gain import (
    GainDrift,
    GainTooHigh,
    GradientDecay,
    GradientFadesWithDepth,
    GradientImbalance,
    gain_drift,
    gain_too_high,
    gradient_decay,
    gradient_fades_with_depth,
    gradient_imbalance,
)
from forewarn.judge.series import Panel, Series
from forewarn.types import RunInfo, Severity
from tests.judge.rules.runs import Run


def one(*values: float) -> Panel:
    column = np.asarray(values, np.float32).reshape(-1, 1)
    return Panel(("",), np.arange(len(column)), column)


NONE = one()


@pytest.mark.parametrize(("depth", "fires"), [(6, False), (24, True)])
def test_a_gain_of_1_3_is_allowed_to_6_blocks_and_not_to_24(depth, fires):
    known = RunInfo(blocks=tuple(f"blocks.{at}" for at in range(depth)))
    finding = gain_too_high(one(1.3), one(1.3**depth), NONE, NONE, NONE, GainTooHigh(), known)
    assert (finding is not None) == fires
    if finding is not None:
        assert finding.value == pytest.approx(1.3, rel=1e-5)
        assert finding.bound == pytest.approx(30 ** (1 / 24))


def test_a_bound_of_ones_own_replaces_the_one_derived_from_the_depth():
    known = RunInfo(blocks=("b.0", "b.1"))
    bound = GainTooHigh(mean_gain_absolute_threshold=1.2)
    assert gain_too_high(one(1.3), one(1.69), NONE, NONE, NONE, bound, known) is not None
    assert gain_too_high(one(1.1), one(1.21), NONE, NONE, NONE, bound, known) is None


def test_the_learning_rate_and_the_clip_value_stand_beside_the_finding():
    finding = gain_drift(one(0.2), one(1.4), one(25.0), NONE, one(3e-4), one(1.0), GainDrift())
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert finding.evidence["lr"] == pytest.approx(3e-4)
    assert finding.evidence["clip"] == 1.0


@pytest.mark.parametrize(("later", "fires"), [(4e-6, True), (2e-5, False)])
def test_a_gradient_that_finds_its_way_to_the_first_block_does_not_fade(later, fires):
    """A radiance field starts with a thousandth of the last gradient in its first layer, and trains well."""
    grown = np.geomspace(4e-6, later, 60)
    for judged in (
        lambda norms: gradient_fades_with_depth(norms, GradientFadesWithDepth()),
        lambda norms: gradient_imbalance(norms, GradientImbalance(), RunInfo()),
    ):
        values = np.stack([grown, np.full(60, 5e-3)], 1).astype(np.float32)
        found = [judged(Panel(("first", "last"), np.arange(end), values[:end])) for end in range(1, 61)]
        assert (found[-1] is not None) == fires
        assert not any(found[:32])


def test_the_natural_variation_between_batches_is_no_drift():
    rng = np.random.default_rng(0)
    gains = 1.2 + rng.uniform(-0.05, 0.05, 2000)
    drifts = gains[10:] / gains[:-10] - 1
    fired = drifts > GainDrift().mean_gain_drift_threshold
    assert not (fired[2:] & fired[1:-1] & fired[:-2]).any()


@pytest.mark.parametrize(("loss", "severity"), [([2.0] * 50, Severity.WARNING), (np.linspace(2, 1, 50), Severity.INFO)])
def test_a_gradient_that_falls_with_the_loss_is_information(loss, severity):
    finding = gradient_decay(Series.of([0.005]), Series.of(loss), Series.of([]), GradientDecay())
    assert finding is not None
    assert finding.severity is severity
    assert finding.bound == (0.01 if severity is Severity.WARNING else 0.1), "the limit that this severity crossed"


def test_a_hinge_loss_that_has_reached_zero_leaves_no_gradient():
    def told(losses):
        run = Run("G107")
        for step, loss in enumerate(losses):
            run.feed({"gradient/share_of_start": 1.0 if step < 20 else 0.0, "train/loss": loss}, step)
        return [alert.severity for alert in run.ledger.alerts]

    assert told([1.0, 0.5, 0.1] + [0.0] * 60) == [Severity.INFO]
    assert told([1.0, 0.9, 0.5] + [0.5] * 60) == [Severity.WARNING]
