"""A preflight leaves no trace: training after it is bit for bit that without it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.preflight_checks.convention import loss_function
from forewarn.preflight_checks.twin import Twin
from tests.bitwise import plain, random_states, seed_everything
from tests.preflight_checks.setups import HEALTHY, adam, classes, loader, mlp


def hooks_on(model: nn.Module) -> list[Any]:
    return [held for module in model.modules() for name, held in vars(module).items() if "hooks" in name and held]


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def trained(name: str, with_preflight: bool) -> Any:
    """Everything about a short training, and the state right before it."""
    seed_everything(3)
    model, optimizer, data, *rest = HEALTHY[name]()
    models = list(model.values()) if isinstance(model, dict) else [model]
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    models[0].eval()  # a mode that is not the default must be kept too
    if with_preflight:
        forewarn.preflight(model, optimizer, data, *rest, steps=12)
    before = (
        random_states(), [modes(part) for part in models], [hooks_on(part) for part in models],
        [parameter.grad for part in models for parameter in part.parameters()], torch.is_grad_enabled(),
        torch.backends.cudnn.flags, plain([each.state_dict() for each in optimizers]),
    )  # fmt: skip
    models[0].train()
    losses = []
    if not isinstance(model, dict):
        is_batch = isinstance(data, tuple)
        function = loss_function(Twin(model, ()), data if is_batch else next(iter(data)), *(rest or [None]))
        for batch in [data] * 4 if is_batch else data:
            loss = function(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    states = plain([part.state_dict() for part in models]), plain([each.state_dict() for each in optimizers])
    return before, losses, states, random_states()


@pytest.mark.parametrize("name", HEALTHY)
def test_training_after_a_preflight_is_bit_identical(name: str) -> None:
    assert trained(name, with_preflight=True) == trained(name, with_preflight=False)


def test_batches_that_the_model_changes_in_place_are_kept() -> None:
    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layers(inputs.div_(2.0))
            return logits

    model, batch = Scaling(), classes(32)
    kept = batch[0].clone()
    forewarn.preflight(model, adam(model), batch, steps=5, find_lr=False)
    assert torch.equal(batch[0], kept)


def test_generators_of_the_loader_and_its_data_are_kept() -> None:
    class Noisy(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.inputs, self.labels = classes()
            self.rng, self.python = np.random.default_rng(0), random.Random(0)

        def __len__(self) -> int:
            return len(self.labels)

        def __getitem__(self, index: int) -> Any:
            return self.inputs[index] + self.rng.normal() * self.python.random(), self.labels[index]

    dataset, generator = Noisy(), torch.Generator().manual_seed(1)
    data = torch.utils.data.DataLoader(dataset, 16, shuffle=True, generator=generator)
    model = mlp().double()
    before = generator.get_state(), copy.deepcopy(dataset.rng.bit_generator.state), dataset.python.getstate()
    forewarn.preflight(model, adam(model), data, steps=5, find_lr=False)
    assert torch.equal(before[0], generator.get_state())
    assert before[1:] == (dataset.rng.bit_generator.state, dataset.python.getstate())


def test_the_step_that_a_scheduler_wraps_is_not_called() -> None:
    model = mlp()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights = plain(model.state_dict())
    forewarn.preflight(model, optimizer, classes(32), steps=5, find_lr=False)
    assert plain(model.state_dict()) == weights
    assert scheduler.last_epoch == 0
    assert not optimizer.state


def test_gradients_of_a_criterion_with_weights_are_kept() -> None:
    criterion = nn.Bilinear(5, 5, 1)
    model = mlp()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        scale: torch.Tensor = criterion(output, output).square().mean()
        return functional.cross_entropy(output, batch[1]) + 0.01 * scale

    forewarn.preflight(model, adam(model), classes(32), loss, steps=5, find_lr=False)
    assert criterion.weight.grad is None


def test_it_works_in_a_block_without_gradients_and_leaves_it_so() -> None:
    model = mlp()
    with torch.no_grad():
        result = forewarn.preflight(model, adam(model), classes(32), steps=5, find_lr=False)
        assert not torch.is_grad_enabled()
    assert result.check("gradients reach all").state == "pass"


def test_a_model_that_keeps_an_output_is_copied() -> None:
    """Torch refuses to copy tensors with a graph."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.kept = mlp(), torch.empty(0)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.kept = self.layers(inputs)
            return self.kept

    model, batch = Caching(), classes(32)
    model(batch[0])
    assert forewarn.preflight(model, adam(model), batch, steps=30).exit_code == 0


class Enclosing(nn.Module):
    """As in minGPT, `forward` calls a function that encloses the layers of this very model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = mlp(), nn.BatchNorm1d(5)
        layers, norm = self.layers, self.norm
        self.function = lambda inputs: norm(layers(inputs))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.function(inputs)
        return logits


def test_functions_that_a_model_holds_use_the_copies() -> None:
    model, batch = Enclosing(), classes(32)
    weights = plain(model.state_dict())
    result = forewarn.preflight(model, adam(model), batch, steps=60)
    assert result.exit_code == 0, str(result)
    assert plain(model.state_dict()) == weights


def test_a_loss_that_calls_the_users_model_is_refused_without_harm() -> None:
    model, batch = Enclosing(), classes(32)
    weights = plain(model.state_dict())
    with pytest.raises(TypeError, match="the loss uses your own model instead of the copy"):
        forewarn.preflight(
            model, adam(model), batch, lambda _, batch: functional.cross_entropy(model(batch[0]), batch[1])
        )
    assert plain(model.state_dict()) == weights


def test_a_model_that_cannot_be_copied_says_what_to_do() -> None:
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    model = Stubborn(12, 5)
    with pytest.raises(RuntimeError, match=r"Stubborn .* cannot be copied .* build a second model"):
        forewarn.preflight(model, adam(model), classes(32))


def test_the_run_of_a_monitor_is_left_alone(watch: Any) -> None:
    model = mlp()
    optimizer = adam(model)
    monitor = watch(model, optimizer)
    result = monitor.preflight(loader(*classes()), steps=10)
    assert monitor.at == 0
    assert not monitor.alerts
    assert result.check("parameters in optimizer").state == "pass"


def test_nobody_is_notified_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREWARN_NOTIFY", "nowhere://this-is-not-a-service")  # watch() would raise
    model = mlp()
    forewarn.preflight(model, adam(model), classes(32), steps=5, find_lr=False)
