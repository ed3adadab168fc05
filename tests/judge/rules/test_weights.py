"""Rules about the weights."""

import copy
import dataclasses

import numpy as np
import pytest
from torch import nn

from forewarn.lab.networks import MLP
from forewarn.types import FrozenCause, Severity
from tests.judge.rules.runs import Run, info
from tests.real_runs import Breakable

KNOWN = info("a.weight", "b.weight", "c.weight", vectors=["a.bias"])


def train(norms, codes=("W102", "W103", "W104"), steps=3000, every=100, known=KNOWN):
    """Weight norms as functions of the step, measured densely at first and then every so often."""
    run = Run(*codes, info=known)
    for step in range(steps):
        if step < 10 or step % every == 0 or step <= run.schedule.until:
            run.feed({"weight/norm": {scope: norm(step) for scope, norm in norms.items()}}, step)
    return run


healthy = {
    "constant": lambda step: 5.0,
    "growing": lambda step: 5.0 * (1 + step / 1000),
    "growing fast at first": lambda step: 5.0 + 10 * (1 - np.exp(-step / 300)),
    "decaying": lambda step: 5.0 * np.exp(-step / 3000),
    "from zero": lambda step: 0.01 * step,
    "from zero in a warm-up": lambda step: 1e-6 * step**2,
    "from zero as a random walk": lambda step: 0.05 * np.sqrt(step),
    "from zero to a level": lambda step: 5 * (1 - np.exp(-step / 200)),
    "after the first step": lambda step: 0.001 * (step + 1),
}


@pytest.mark.parametrize("every", [1, 30, 100, 700])
@pytest.mark.parametrize("name", healthy)
def test_healthy_weights_are_quiet(name, every):
    run = train({"a.weight": healthy[name], "b.weight": lambda s: 4.0, "c.weight": lambda s: 6.0}, every=every)
    assert run.ledger.alerts == ()


def test_a_tensor_thrown_away_is_named_although_it_takes_several_steps():
    norm = lambda step: 5.0 if step < 1500 else 5.0 * 1.3 ** (step - 1500)  # noqa: E731
    run = train({"a.weight": norm, "b.weight": lambda s: 4.0}, codes=("W102",), steps=1530, every=5)
    (alert,) = run.ledger.alerts
    assert alert.scope == "a.weight"
    assert 1505 <= alert.since <= 1515
    assert alert.finding.evidence["level"] == 5.0


def test_a_bias_may_grow_as_it_likes():
    run = train({"a.bias": lambda step: 0.1 if step < 1500 else 10.0}, codes=("W102", "W104"))
    assert run.ledger.alerts == ()


def test_weights_that_are_no_numbers_are_critical():
    run = Run("W101", "W104", info=KNOWN)
    for step in range(20):
        lost = step >= 15
        run.feed({
            "weight/norm": {"a.weight": 0.0 if lost else 5.0}, "weight/nonfinite": {"a.weight": 64.0 * lost}
        })  # fmt: skip
    (alert,) = run.ledger.alerts
    assert (alert.code, alert.severity) == ("W101", Severity.CRITICAL), "nothing shrank: what is left is not a norm"


def test_a_layer_on_another_scale_is_compared_by_the_size_of_its_elements():
    run = train({"a.weight": lambda s: 5.0, "b.weight": lambda s: 8.0, "c.weight": lambda s: 9000.0}, codes=("W103",))
    (alert,) = run.ledger.alerts
    assert alert.scope == "c.weight"
    assert alert.finding.value == pytest.approx(9000 / 5)
    assert alert.finding.evidence["root_mean_square"] == pytest.approx(9000 / 8)
    assert alert.finding.evidence["compared_with"] == "a.weight"


def test_two_layers_are_too_few_to_say_which_is_odd():
    run = train({"a.weight": lambda s: 5.0, "b.weight": lambda s: 1e5}, codes=("W103",))
    assert run.ledger.alerts == ()


def test_layers_of_another_kind_are_not_compared():
    run = train({"a.weight": lambda s: 5.0, "b.weight": lambda s: 6.0, "a.bias": lambda s: 1e-6}, codes=("W103",))
    assert run.ledger.alerts == ()


def test_a_weight_that_fades_away_is_named():
    run = train({"a.weight": lambda step: 5.0 * np.exp(-step / 500)}, codes=("W104",))
    (alert,) = run.ledger.alerts
    assert alert.finding.evidence["began_at"] == pytest.approx(5.0, rel=0.01)
    assert 1100 < alert.since < 1400, "it has lost nine tenths after 1151 steps"


@pytest.mark.parametrize("norms", [[1e6 * 0.5**step for step in range(12)], [1.0] * 11 + [50.0]])
def test_a_codebook_that_the_loop_itself_writes_is_no_weight_that_shrinks_or_spikes(norms):
    for cause in (FrozenCause.ON_PURPOSE, FrozenCause.MOVING):
        run = Run("W102", "W104", info=info("codes.weight"))
        for norm in norms:
            run.feed({"weight/norm": {"codes.weight": norm}, "update/frozen_cause": {"codes.weight": float(cause)}})
        assert bool(run.ledger.alerts) == (cause is FrozenCause.MOVING)


def test_a_head_that_grows_bit_by_bit_between_two_readings_has_not_jumped():
    run = train({"a.weight": lambda step: 0.014 + 0.0015 * step}, codes=("W102",), steps=400)
    assert run.ledger.alerts == ()


def decay_fed(decay, optimizer="SGD", gradient=0.1, losses=(2.0, 2.0), **group):
    known = dataclasses.replace(KNOWN, optimizers=(optimizer,), groups=({"weight_decay": decay, **group},))
    run = Run("W106", info=known)
    for step in range(8):
        run.feed({
            "train/loss": losses[step // 4], "train/lr": {"0": 0.01}, "weight/norm": {"a.weight": 5.0},
            "gradient/norm": {"a.weight": gradient}, "update/ratio": {"a.weight": 0.02},
            "monitor/update_ratio_median": 0.02,
        })  # fmt: skip
    return run.ledger.alerts


def test_decay_is_compared_with_the_whole_update_and_momentum_multiplies_it():
    (alert,) = decay_fed(1.0)  # 0.01 of each weight per step, of an update of 0.02
    assert (alert.finding.value, alert.finding.evidence["decay"]) == pytest.approx((0.5, 0.01))
    assert decay_fed(0.5) == ()
    assert decay_fed(0.1, momentum=0.9)
    assert decay_fed(0.1, "Muon", momentum=0.95) == (), "apart from the gradient, it has no momentum"


def test_decay_that_adam_divides_is_compared_with_the_gradient():
    assert decay_fed(0.1, "Adam")  # 0.1 × 5.0 against a gradient of 0.1
    assert decay_fed(0.001, "Adam") == ()


def test_decay_and_gradient_balance_in_a_minimum():
    assert decay_fed(0.1, "Adam", losses=(2.0, 0.1)) != ()
    run = decay_fed(0.01, "Adam", losses=(2.0, 0.1), gradient=0.2)
    assert run == ()


def decay_of_thirty(run):
    return Breakable(run, weight_decay=30.0).train(60)


class WithTarget(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = MLP([16, 32, 5])
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, inputs):
        return self.online(inputs)


def with_target(run, follow):
    it = Breakable(run, WithTarget(), parameters=lambda model: model.online.parameters())

    def update(step):
        if follow and step % 50 == 0:
            it.model.target.load_state_dict(it.model.online.state_dict())

    it.after_update = update
    return it.train(400)


def test_a_target_network_that_follows_is_no_stale_copy(tmp_path):
    assert [alert.code for alert in with_target(tmp_path / "run", follow=True).alerts] == []


class TwoHeads(nn.Module):
    """Two heads of the same shape on one body, of which the second may not be trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.first, self.second = MLP([32, 5]), MLP([32, 5])

    def forward(self, inputs):
        features = self.body(inputs).relu()
        return self.first(features) + self.second(features)


def test_a_second_head_that_is_frozen_is_no_copy_of_the_first(tmp_path):
    model = TwoHeads()
    model.second.requires_grad_(False)
    assert [alert.code for alert in Breakable(tmp_path / "run", model).train(320).alerts] == []


def test_a_second_head_outside_the_optimizer_is_no_copy_of_the_first(tmp_path):
    it = Breakable(
        tmp_path / "run", TwoHeads(), parameters=lambda model: [*model.body.parameters(), *model.first.parameters()]
    )
    alerts = it.train(320).alerts
    assert {alert.code for alert in alerts} >= {"U106"}
    assert "W107" not in {alert.code for alert in alerts}


def test_a_copy_of_a_model_with_a_frozen_part_is_a_copy(tmp_path):
    model = WithTarget()
    model.online.layers[0].requires_grad_(False)
    it = Breakable(tmp_path / "run", model, parameters=lambda model: model.online.layers[2].parameters())
    assert "W107" in {alert.code for alert in it.train(400).alerts}


FAULTS = {"W106": decay_of_thirty, "W107": lambda run: with_target(run, follow=False)}
