import torch
from torch import nn

from forewarn.measure.module_tree import Tree


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))


def test_a_model_that_is_the_same_is_not_walked_again(monkeypatch):
    model = net()
    tree = Tree(model)
    found = tree.hookable
    monkeypatch.setattr(nn.Module, "named_modules", None)
    assert tree.hookable is found
    assert list(found) == ["", "0", "1", "1.0", "1.1"]


def test_modules_that_come_go_or_are_replaced_at_any_depth_are_seen():
    model = net()
    tree = Tree(model)
    assert "1.1" in tree.hookable
    model[1].append(nn.Tanh())
    assert isinstance(tree.hookable["1.2"], nn.Tanh)
    model[1][0] = nn.Sigmoid()
    assert isinstance(tree.hookable["1.0"], nn.Sigmoid)
    del model[1]
    assert list(tree.hookable) == ["", "0"]


def test_a_module_that_is_compiled_later_is_left_out():
    model = net()
    tree = Tree(model)
    assert not tree.any_compiled
    model[1].compile(backend="eager")
    assert tree.any_compiled
    assert list(tree.hookable) == ["", "0"]


def test_parameters_are_those_of_now():
    model = net()
    tree = Tree(nn.DataParallel(model))
    assert tree.parameters() == [model[0].weight, model[0].bias, model[1][1].weight, model[1][1].bias]
    model[0].bias = None
    model[1][1].weight = nn.Parameter(torch.zeros(1, 3))
    assert [id(each) for each in tree.parameters()] == [
        id(each) for each in (model[0].weight, None, model[1][1].weight, model[1][1].bias)
    ]


def test_a_list_that_torch_puts_another_dictionary_into_is_followed():
    model = net()
    tree = Tree(model)
    assert len(tree.hookable) == 5
    del model[2:]  # takes nothing out, but makes the dictionary anew
    model[0] = nn.Linear(2, 7)
    assert tree.hookable["0"] is model[0]
    assert tree.parameters()[0] is model[0].weight


def test_modules_are_told_apart_by_what_they_are_and_by_their_names():
    class Alike(nn.Linear):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            return True

    model = nn.Sequential()
    model.a = Alike(2, 2)
    tree = Tree(model)
    assert tree.hookable["a"] is model.a
    model.a = Alike(2, 2)
    assert tree.hookable["a"] is model.a
    module = model.a
    del model.a
    model.b = module
    assert list(tree.hookable) == ["", "b"]
