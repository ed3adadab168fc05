"""The scale on which the weights start."""

import math

import pytest
import torch
from torch import nn

from forewarn.types import ParameterInfo, RunInfo
from tests.judge.rules.runs import Run
from tests.real_runs import Breakable

SHAPES = {"a.weight": (64, 16), "b.weight": (64, 64), "c.weight": (5, 64)}


def fed(gain, spread=5.0, kind="Linear.weight", ratio=0.001, losses=(2.3,)):
    parameters = {name: ParameterInfo(shape, kind, "float32", 0, True) for name, shape in SHAPES.items()}
    run = Run("W108", info=RunInfo(parameters=parameters))
    norms = {name: gain * math.sqrt(shape[0]) for name, shape in SHAPES.items()}  # rms gain / sqrt(inputs)
    for loss in losses:
        run.feed({
            "weight/norm": norms, "activation/std": dict.fromkeys("abc", spread),
            "update/ratio": dict.fromkeys(SHAPES, ratio), "train/loss": loss,
        })  # fmt: skip
    return run.ledger.alerts


def test_the_gain_is_the_root_mean_square_times_the_root_of_the_inputs():
    (alert,) = fed(gain=4.0)
    assert alert.finding.value == pytest.approx(4.0, rel=1e-6)
    assert alert.remedies[0].action == "lower_initial_scale"
    assert fed(gain=1.5) == ()


def test_weights_that_are_scaled_in_forward_may_be_large():
    assert fed(gain=10.0, spread=1.0) == ()


def test_embeddings_have_no_gain():
    assert fed(gain=10.0, kind="Embedding.weight") == ()


def test_small_weights_matter_if_the_first_step_rewrites_them_or_the_loss_stands_still():
    (alert,) = fed(gain=0.02, ratio=1.0)
    assert alert.remedies[0].action == "raise_initial_scale"
    assert fed(gain=0.02, losses=[2.3] * 30)
    assert fed(gain=0.02, losses=[2.3 - 0.05 * step for step in range(30)]) == ()
    assert fed(gain=0.02, losses=[2.3] * 10) == ()


@pytest.mark.parametrize("initialize", [nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.orthogonal_])
def test_usual_initializations_have_a_gain_between_the_limits(initialize):
    gains = [float(initialize(torch.empty(shape)).norm()) / math.sqrt(shape[0]) for shape in SHAPES.values()]
    assert 0.06 < sorted(gains)[1] < 2.5


def weights_ten_times_too_large(run):
    it = Breakable(run)
    with torch.no_grad():
        for layer in it.linears():
            layer.weight.mul_(10)
    return it.train(60)


FAULTS = {"W108": weights_ten_times_too_large}
