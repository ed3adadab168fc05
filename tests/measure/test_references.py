"""Metrics of a watched run that compare with a reference."""

import copy
import dataclasses
import logging
import random

import numpy as np
import pytest
import torch
from torch import nn

from forewarn import ActivationDifferenceMetric, ParameterDifferenceMetric


class Twice(nn.Module):
    """Calls one layer twice, returns a tuple, changes its input in place and drops units."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x += 1
        hidden = self.layer(self.norm(self.layer(x).tanh()))
        return self.drop(hidden), hidden


def training(metrics_of, watch, steps=6, every=1):
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = watch(model, optimizer, every=every, metrics=metrics_of(model))
    seen = []
    for _ in range(steps):
        x = torch.randn(8, 4)
        seen.append((x.clone(), copy.deepcopy(model.state_dict())))
        loss = sum(each.square().mean() for each in model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    return model, monitor, seen


def distance(a, b):
    return (a - b).norm()


def twin(model):
    return copy.deepcopy(model).eval()


def test_activations_equal_a_computation_by_hand(watch):
    references = []

    def metrics(model):
        references.append(twin(model))
        return [
            ActivationDifferenceMetric("distance", distance, "layer", reference=references[0]),
            ActivationDifferenceMetric("norm", regex=r"\[root module\]\[1\]", reference=references[0]),
        ]

    _, monitor, seen = training(metrics, watch)
    inputs, weights = seen[-1]
    then = Twice()
    then.load_state_dict(weights)
    first, second = [], []
    for each, kept in ((then.train(), first), (references[0], second)):
        each.layer.register_forward_hook(lambda module, args, output, kept=kept: kept.append(output))
        with torch.no_grad():
            kept.append(each(inputs.clone())[1])
    expected = (distance(first[0], second[0]) + distance(first[1], second[1])) / 2
    history = monitor.history
    assert history.panel("activation_difference_metric/distance").scopes == ("layer",)
    assert history.series("activation_difference_metric/distance", "layer").last == pytest.approx(expected.item(), 1e-5)
    whole = history.series("activation_difference_metric/norm", "[root module][1]").last
    assert whole == pytest.approx(distance(first[2], second[2]).item(), 1e-5)


def test_parameters_are_compared_with_each_reference_as_it_is_then(watch):
    moving, first = nn.Linear(1, 1), nn.Linear(1, 1)

    def metrics(model):
        nonlocal moving, first
        moving, first = copy.deepcopy(model), copy.deepcopy(model)
        return [
            ParameterDifferenceMetric("from_teacher", distance, "layer", reference=moving),
            ParameterDifferenceMetric("from_start", distance, "layer"),
        ]

    model, monitor, _ = training(metrics, watch)
    with torch.no_grad():
        moving.layer.weight.copy_(model.layer.weight + 2.0)
    monitor.step(1.0)
    history = monitor.history
    assert history.series("parameter_difference_metric/from_teacher", "layer.weight").last == pytest.approx(8.0)
    start = distance(model.layer.weight, first.layer.weight).item()
    assert history.series("parameter_difference_metric/from_start", "layer.weight").last == pytest.approx(start, 1e-5)


def test_training_is_bit_identical_with_a_reference_and_hooks_are_gone(watch):
    references = []

    def metrics(model):
        references.append(twin(model))
        return [ActivationDifferenceMetric("norm", reference=references[-1])]

    bare, _, _ = training(lambda model: [], watch)
    state = torch.get_rng_state()
    compared, monitor, _ = training(metrics, watch)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(bare.parameters(), compared.parameters(), strict=True))
    assert torch.equal(bare.norm.running_mean, compared.norm.running_mean)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in references[0].modules())
    assert not monitor._probes["metrics"]._references[0].kept, "what was compared is released"


def test_the_reference_runs_on_measured_steps_only(watch):
    calls = []

    def metrics(model):
        reference = twin(model)
        reference.register_forward_hook(lambda *given: calls.append(1))
        return [ActivationDifferenceMetric("norm", reference=reference)]

    training(metrics, watch, every=lambda step: step in (1, 4))
    assert len(calls) == 2


def test_a_reference_that_fails_is_named_once_and_the_rest_goes_on(watch, caplog):
    def metrics(model):
        reference = twin(model)
        reference.layer.register_forward_hook(lambda *given: 1 / 0)
        return [ActivationDifferenceMetric("gone", "norm", reference=reference), ParameterDifferenceMetric("norm")]

    with caplog.at_level(logging.WARNING, logger="forewarn"):
        _, monitor, _ = training(metrics, watch)
    assert [each.getMessage() for each in caplog.records] == [
        "the reference of gone failed: ZeroDivisionError: division by zero; nothing is compared with it from now on"
    ]
    assert monitor.history.series("parameter_difference_metric/norm", "layer.weight").last > 0
    assert not monitor.alerts


@pytest.mark.parametrize(
    ("reference", "kind", "told"),
    [
        (lambda model: copy.deepcopy(model), ActivationDifferenceMetric, r"call reference\.eval\(\)"),
        (lambda model: model, ParameterDifferenceMetric, "shares layer.weight with the watched model"),
        (lambda model: nn.Linear(4, 4), ParameterDifferenceMetric, "has no layer.weight of shape"),
        (lambda model: nn.Linear(4, 4).eval(), ActivationDifferenceMetric, "only one of them has drop, layer, norm"),
    ],
)
def test_a_reference_that_can_not_be_compared_with_is_an_error_at_attaching(watch, reference, kind, told):
    with pytest.raises(ValueError, match=told):
        training(lambda model: [kind("norm", reference=reference(model))], watch)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


class Cache:
    def __init__(self):
        self.seen = []


class Taking(nn.Module):
    """Changes what it is given, whatever that is, and draws random numbers that are not torch's."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, given):
        if self.kind == "dataclass":
            given.x.mul_(0.5)
            x = given.x
        elif self.kind == "generator":
            x = torch.stack(list(given))
        elif self.kind == "object":
            given.seen.append(torch.ones(8, 4) * (1 + len(given.seen)))
            x = torch.stack(given.seen).sum(dim=0)
        else:
            x = given * random.random() * np.random.rand()
        return self.layer(x)


GIVEN = {
    "dataclass": lambda x: Batch(x),
    "generator": lambda x: (row for row in x),
    "object": lambda x: Cache(),
    "random numbers": lambda x: x,
}


@pytest.mark.parametrize("kind", GIVEN)
def test_what_the_model_is_given_is_the_same_whether_a_reference_has_seen_it_or_not(kind, watch, caplog):
    weights = []
    for compared in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Taking(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        metrics = [ActivationDifferenceMetric("distance", distance, reference=twin(model))] if compared else []
        monitor = watch(model, optimizer, metrics=metrics)
        for _ in range(4):
            loss = model(GIVEN[kind](torch.randn(8, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        weights.append(model.layer.weight.detach().clone())
        assert monitor._loop.failures == {}
    assert torch.equal(*weights)
    assert ("activation_difference_metric/distance" in monitor.history) is (kind != "generator")
    assert ("reference of distance failed" in caplog.text) is (kind == "generator")


def test_a_layer_that_is_replaced_by_one_of_another_shape_is_no_longer_compared(watch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, metrics=[ParameterDifferenceMetric("norm")])
    for step in range(4):
        if step == 2:
            model[1] = nn.Linear(4, 3)
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    assert monitor._loop.failures == {}
    differences = monitor.history.panel("parameter_difference_metric/norm")
    newest = dict(zip(differences.scopes, differences.last, strict=True))
    assert newest["0.weight"] > 0
    assert np.isnan(newest["1.weight"])


def test_a_reference_that_shares_memory_with_the_model_is_an_error(watch, small):
    model, optimizer = small
    reference = copy.deepcopy(model).eval()
    reference.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"shares 0\.weight with the watched model"):
        watch(model, optimizer, metrics=[ParameterDifferenceMetric("norm", reference=reference)])
