"""The parameter index follows its model: whatever parameters it has now are the ones that are watched."""

import copy

import pytest
import torch
from torch import nn

from forewarn.measure.parameters import ParameterIndex


def network():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3)), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def roster_of(model):
    return ParameterIndex(model, [torch.optim.SGD(model.parameters(), lr=0.1)])


def add_a_layer(model):
    model[1].append(nn.Linear(3, 2))


def remove_a_layer(model):
    del model[1][1]


def put_in_another_layer(model):
    model[1][0] = nn.Linear(3, 3)


def replace_a_parameter(model):
    model[0].bias = nn.Parameter(torch.ones(3))


def take_a_parameter_away(model):
    model[0].bias = None


def untie(model):
    model[2].weight = nn.Parameter(torch.ones(3, 3))


CHANGES = [add_a_layer, remove_a_layer, put_in_another_layer, replace_a_parameter, take_a_parameter_away, untie]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_the_model_is_seen(change):
    model = network()
    parameter_index = roster_of(model)
    assert list(parameter_index.live().values()) == list(model.parameters())
    change(model)
    assert [id(each) for each in parameter_index.live().values()] == [id(each) for each in model.parameters()]
    parameter_index.refresh()
    assert parameter_index.version == 1
    assert parameter_index.names == tuple(name for name, _ in model.named_parameters())
    assert all(mine is its for mine, its in zip(parameter_index.parameters, model.parameters(), strict=True))


def test_training_and_new_values_are_no_change():
    model = network()
    parameter_index = roster_of(model)
    model(torch.ones(2, 3)).sum().backward()
    parameter_index.optimizers[0].step()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.double()
    parameter_index.refresh()
    assert parameter_index.version == 0


def test_parameters_without_values_are_left_out_until_they_have_some():
    model = network()
    model[1].to("meta")
    parameter_index = roster_of(model)
    assert parameter_index.names == ("0.weight", "0.bias", "2.bias")
    model[1].to_empty(device="cpu")
    parameter_index.refresh()
    assert parameter_index.names == tuple(name for name, _ in model.named_parameters())


def test_the_group_of_each_parameter_follows_the_optimizer():
    model = network()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    parameter_index = ParameterIndex(model, [optimizer])
    assert parameter_index.groups().tolist() == [0, 0, -1, -1, -1, -1]
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert parameter_index.groups().tolist() == [0, 0, 1, 1, 1, -1]


@pytest.mark.parametrize(("device", "is_copied"), [("cpu", True), ("meta", False)])
def test_what_starts_with_the_values_of_a_trained_parameter_is_a_copy_if_they_can_be_read(device, is_copied):
    trained = nn.Linear(3, 3, device=device)
    model = nn.ModuleDict({"trained": trained, "idle": copy.deepcopy(trained), "other": nn.Linear(3, 3)})
    info = ParameterIndex(model, [torch.optim.SGD(trained.parameters(), lr=0.1)]).info()
    assert {name for name, one in info.items() if one.copied} == ({"idle.weight", "idle.bias"} if is_copied else set())
