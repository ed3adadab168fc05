"""Whether a backward pass has filled gradients, without a walk through the model."""

import weakref

import pytest
import torch
from torch import nn

from forewarn.measure.gradient_writes import GradientWriteDetector
from forewarn.measure.parameters import ParameterIndex


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


@pytest.fixture
def parameter_index(model):
    return ParameterIndex(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def loss(model):
    return model(torch.ones(2, 3)).sum()


def test_a_pass_that_fills_gradients_is_seen_also_where_there_were_some(model, parameter_index):
    filling = GradientWriteDetector(parameter_index)
    for _ in range(2):
        filling.begins()
        assert not filling.has_come()
        loss(model).backward()
        assert filling.has_come()


@pytest.mark.parametrize("before", [False, True])
def test_a_pass_that_fills_none_is_told_from_one_that_does(model, parameter_index, before):
    if before:
        loss(model).backward()
    filling = GradientWriteDetector(parameter_index)
    filling.begins()
    torch.autograd.grad(loss(model), list(model.parameters()))
    assert not filling.has_come()


def test_gradients_of_parameters_that_the_model_has_got_since_count(model, parameter_index):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.append(nn.Linear(1, 1))
    filling = GradientWriteDetector(parameter_index)
    filling.begins()
    assert not filling.has_come()
    loss(model).backward()
    assert filling.has_come()


def test_the_model_is_not_walked_for_a_pass_that_fills_what_is_known(model, parameter_index, monkeypatch):
    filling = GradientWriteDetector(parameter_index)
    monkeypatch.setattr(parameter_index, "live", lambda: pytest.fail("the model was walked"))
    filling.begins()
    loss(model).backward()
    assert filling.has_come()


def test_a_gradient_in_the_place_of_another_counts_though_neither_was_written_to(model, parameter_index):
    loss(model).backward()
    filling = GradientWriteDetector(parameter_index)
    filling.begins()
    for parameter in model.parameters():  # as torch does where a graph of the gradients is made
        parameter.grad = parameter.grad.clone()
    assert filling.has_come()


def test_no_gradient_is_held_once_the_pass_is_over(model, parameter_index):
    loss(model).backward()
    held = weakref.ref(model[0].weight.grad)
    filling = GradientWriteDetector(parameter_index)
    filling.begins()
    filling.has_come()
    model.zero_grad()
    assert held() is None
