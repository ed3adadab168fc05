"""How a loss is found without asking for it, and what is asked if it is not."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.preflight_checks.convention import first_batches, loss_function
from forewarn.preflight_checks.twin import Twin
from tests.preflight_checks.setups import Transformer, adam, classes, loader, mlp, sequences


def loss_of(model: nn.Module, batch: Any, loss: Any = None) -> float:
    return float(loss_function(Twin(model, ()), batch, loss)(model, batch).detach())


def test_pairs_with_class_numbers_get_cross_entropy() -> None:
    model, batch = mlp(), classes(32)
    assert loss_of(model, batch) == pytest.approx(float(functional.cross_entropy(model(batch[0]), batch[1]).detach()))


def test_logits_with_classes_in_the_second_dimension_get_cross_entropy() -> None:
    model, images = nn.Conv2d(1, 3, 1), torch.randn(2, 1, 5, 5)
    labels = torch.randint(3, (2, 5, 5))
    expected = float(functional.cross_entropy(model(images), labels).detach())
    assert loss_of(model, (images, labels)) == pytest.approx(expected)


def test_a_model_that_takes_targets_and_returns_its_loss_is_called_so() -> None:
    model, tokens = Transformer().eval(), sequences()
    batch = (tokens[:, :-1], tokens[:, 1:])
    assert loss_of(model, batch) == pytest.approx(float(model(*batch)[1].detach()))


def test_a_model_whose_output_is_its_loss_is_called_with_the_batch() -> None:
    class Toy(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch).square().mean()

    model, batch = Toy(3, 2), torch.randn(4, 3)
    assert loss_of(model, batch) == pytest.approx(float(model(batch).detach()))


@pytest.mark.parametrize("criterion", [nn.MSELoss(), functional.mse_loss])
def test_a_criterion_gets_outputs_and_targets(criterion: Any) -> None:
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2))
    assert loss_of(model, batch, criterion) == pytest.approx(
        float((model(batch[0]) - batch[1]).square().mean().detach())
    )


MISTAKES: dict[str, tuple[Any, Any, Any, str]] = {
    "float targets without a loss": (
        nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2)), None,
        "the loss cannot be told: the model returned a tensor of shape [4, 2] for a batch of a tuple of 2; pass loss=",
    ),
    "a batch without targets": (
        nn.Linear(3, 2), torch.randn(4, 3), None, "the loss cannot be told: the model returned a tensor",
    ),
    "a mapping with unknown names": (
        nn.Linear(3, 2), {"x": torch.randn(4, 3)}, None, "the model cannot be called with a dict with the keys x: ",
    ),
    "a loss that is no function": (nn.Linear(3, 2), torch.randn(4, 3), "mse", "loss must be a function of"),
    "a loss per sample": (
        nn.Linear(3, 2), torch.randn(4, 3), lambda model, batch: model(batch).sum(1),
        "the loss function returned a tensor of shape [4], and not one loss; pass loss=",
    ),
    "an iterator": (nn.Linear(3, 2), iter([torch.randn(4, 3)]), None, "data is an iterator, and what preflight reads"),
    "no batches": (nn.Linear(3, 2), [], None, "data holds no batch"),
    "no data": (nn.Linear(3, 2), 7, None, "data must be a batch, a loader, a list of batches or a function"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_missing_is_said(mistake: str) -> None:
    model, data, loss, words = MISTAKES[mistake]
    with pytest.raises(TypeError, match=re.escape(words)):
        forewarn.preflight(model, adam(model), data, loss)


def test_a_loss_of_the_users_own_model_is_refused() -> None:
    model, batch = mlp(), classes(32)
    with pytest.raises(TypeError, match="the loss uses your own model instead of the copy"):
        forewarn.preflight(
            model, adam(model), batch, lambda _, batch: functional.cross_entropy(model(batch[0]), batch[1])
        )
    assert model[0].weight.grad is None


def test_steps_must_be_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="steps must be a number of steps, at least 1, not 0"):
        forewarn.preflight(mlp(), adam(mlp()), classes(32), steps=0)


def test_batches_come_from_loaders_lists_and_functions() -> None:
    batch = classes(24)
    assert len(first_batches(loader(*classes(192)), 3, lambda: 0.0).batches) == 3
    assert len(first_batches([batch, batch], 8, lambda: 0.0).batches) == 2
    assert len(first_batches(lambda: batch, 4, lambda: 0.0).batches) == 4
    for one in (batch, list(batch), {"x": batch[0]}, batch[0]):
        assert first_batches(one, 8, lambda: 0.0).batches == (one,)


def test_the_result_is_plain_json() -> None:
    import json

    model = mlp()
    result = forewarn.preflight(model, adam(model), classes(32), steps=12).to_json()
    assert json.loads(json.dumps(result))["exit_code"] == result["exit_code"]
    assert all(math.isfinite(rate) for rate in result["curve"]["rates"])
