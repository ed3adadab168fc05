"""What a preflight says about models that are sound and about models that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from tests.bitwise import seed_everything
from tests.preflight_checks.setups import HEALTHY, adam, classes, convolution_with_batch_norm, loader, mlp


def checked(parts: tuple[Any, ...], **options: Any) -> forewarn.Preflight:
    return forewarn.preflight(*parts, **options)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_setup_is_ready(name: str) -> None:
    seed_everything(0)
    result = checked(HEALTHY[name](), steps=80)
    assert result.exit_code == 0, str(result)


def plain() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model), loader(*classes())


def layer_not_in_optimizer() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model[:4]), loader(*classes())


def in_two_optimizers() -> tuple[Any, ...]:
    model = mlp()
    return model, [adam(model), torch.optim.SGD(model[4].parameters(), 0.01)], loader(*classes())


def optimizer_of_another_model() -> tuple[Any, ...]:
    return mlp(), adam(mlp()), loader(*classes())


def everything_frozen() -> tuple[Any, ...]:
    model = mlp().requires_grad_(False)
    return model, adam(model), loader(*classes())


def evaluation_mode() -> tuple[Any, ...]:
    model, *rest = convolution_with_batch_norm()
    return model.eval(), *rest


def batch_norm_in_evaluation_mode() -> tuple[Any, ...]:
    model, *rest = convolution_with_batch_norm()
    model[1].eval()
    return model, *rest


class Cut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.first(inputs).relu().detach())
        return logits


def graph_cut_in_the_middle() -> tuple[Any, ...]:
    model = Cut()
    return model, adam(model), loader(*classes())


def detached_loss() -> tuple[Any, ...]:
    return *plain(), lambda model, batch: functional.cross_entropy(model(batch[0]).detach(), batch[1])


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = mlp(), nn.Linear(12, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(inputs)
        return logits


def layer_never_used() -> tuple[Any, ...]:
    model = Unused()
    return model, adam(model), loader(*classes())


def labels_from_one() -> tuple[Any, ...]:
    inputs, labels = classes()
    model = mlp()
    return model, adam(model), loader(inputs, labels + 1)


def too_few_outputs() -> tuple[Any, ...]:
    model = mlp(3)
    return model, adam(model), loader(*classes()), nn.CrossEntropyLoss()


def inputs_from_0_to_255() -> tuple[Any, ...]:
    inputs, labels = classes()
    model = mlp()
    return model, adam(model), loader((inputs * 40 + 128).clamp(0, 255), labels)


def inputs_with_nan() -> tuple[Any, ...]:
    inputs, labels = classes()
    inputs[3, 2] = float("nan")
    model = mlp()
    return model, adam(model), [(inputs[:32], labels[:32])]


def constant_inputs() -> tuple[Any, ...]:
    inputs, labels = classes()
    model = mlp()
    return model, adam(model), loader(torch.zeros_like(inputs), labels)


def inputs_ignored() -> tuple[Any, ...]:
    return *plain(), lambda model, batch: functional.cross_entropy(model(0 * batch[0]), batch[1])


def one_batch_again_and_again() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model), [classes(32)] * 4


def sorted_by_class() -> tuple[Any, ...]:
    inputs, labels = classes()
    order = labels.argsort()
    model = mlp()
    return model, adam(model), [(inputs[order[:24]], labels[order[:24]] * 0), (inputs[:24], labels[:24])]


def softmax_twice() -> tuple[Any, ...]:
    model = nn.Sequential(*mlp(), nn.Softmax(1))
    return model, adam(model), loader(*classes())


def weights_ten_times_too_large() -> tuple[Any, ...]:
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model, adam(model), loader(*classes())


def rate_a_thousand_times_too_high() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model, 2.0), loader(*classes())


def rate_far_too_low() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model, 1e-8), loader(*classes())


def no_rate() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model, 0.0), loader(*classes())


def broadcast_in_the_loss() -> tuple[Any, ...]:
    model, inputs = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(128, 6)
    targets = inputs[:, 0] * inputs[:, 1]
    return (
        model,
        adam(model),
        loader(inputs, targets),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def inputs_of_another_width() -> tuple[Any, ...]:
    model = mlp()
    return model, adam(model), (torch.randn(16, 7), torch.randint(5, (16,)))


LOOK, FAIL = 1, 2
FAULTS: dict[Callable[[], tuple[Any, ...]], tuple[int, str, str]] = {
    layer_not_in_optimizer: (LOOK, "parameters in optimizer", "2 of 6 tensors are in no optimizer group: 4.weight"),
    in_two_optimizers: (LOOK, "parameters in optimizer", "2 of 6 tensors are in two optimizer groups: 4.weight"),
    optimizer_of_another_model: (FAIL, "parameters in optimizer", "the optimizer holds none"),
    everything_frozen: (FAIL, "parameters in optimizer", "none of the 6 tensors has requires_grad=True"),
    evaluation_mode: (LOOK, "training mode", "the model is in evaluation mode"),
    batch_norm_in_evaluation_mode: (
        LOOK,
        "training mode",
        "layer 1 (BatchNorm2d) does not update its running statistics",
    ),
    graph_cut_in_the_middle: (LOOK, "gradients reach all", "not first.bias, first.weight"),
    detached_loss: (FAIL, "a step runs", "does not depend on any trainable parameter"),
    layer_never_used: (LOOK, "gradients reach all", "6 of 8 trainable tensors, in 30 steps; not spare.weight"),
    labels_from_one: (FAIL, "labels in range", "to 5, but the 5 outputs are 0 to 4"),
    too_few_outputs: (FAIL, "labels in range", "0 to 4, but the 3 outputs are 0 to 2"),
    inputs_from_0_to_255: (LOOK, "inputs' scale", "are not normalized"),
    inputs_with_nan: (FAIL, "batches differ", "NaN or infinite values in the inputs: 1"),
    constant_inputs: (FAIL, "batches differ", "all inputs are the same value"),
    inputs_ignored: (LOOK, "one batch overfits", "without looking at the inputs it could reach"),
    one_batch_again_and_again: (LOOK, "batches differ", "all 4 batches are the same"),
    sorted_by_class: (LOOK, "batches differ", "all targets of a batch are 0"),
    softmax_twice: (LOOK, "the first steps", "applies softmax to probabilities"),
    weights_ten_times_too_large: (LOOK, "activations over depth", "The initial weights are too large"),
    rate_a_thousand_times_too_high: (FAIL, "learning rate", "yours is 2: the loss goes from 1.6"),
    rate_far_too_low: (LOOK, "learning rate", "yours is 1e-8"),
    no_rate: (FAIL, "learning rate", "yours is 0: nothing moves"),
    broadcast_in_the_loss: (LOOK, "one batch overfits", ""),
    inputs_of_another_width: (FAIL, "a step runs", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
}


@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_a_fault_is_named_by_its_check(make: Callable[[], tuple[Any, ...]]) -> None:
    seed_everything(0)
    exit_code, name, words = FAULTS[make]
    needs_rates = name == "learning rate" or make is broadcast_in_the_loss
    result = checked(make(), steps=80 if needs_rates or name == "one batch overfits" else 10, find_lr=needs_rates)
    assert result.check(name).state in {LOOK: ("look", "fail"), FAIL: ("fail",)}[exit_code], str(result)
    assert words in result.check(name).detail
    assert result.exit_code >= exit_code
    assert name in str(result)


def test_a_wrong_rate_does_not_look_like_another_fault() -> None:
    seed_everything(0)
    result = checked(rate_a_thousand_times_too_high(), steps=80)
    assert [check.name for check in result.checks if check.state in ("look", "fail")] == ["learning rate"]


def test_shuffled_labels_can_still_be_learned_by_heart() -> None:
    seed_everything(0)
    inputs, labels = classes()
    model = mlp()
    result = checked((model, adam(model), loader(inputs, labels[torch.randperm(len(labels))])), steps=80)
    assert result.check("one batch overfits").state == "pass"


def test_frozen_parameters_are_reported_and_not_blamed() -> None:
    seed_everything(0)
    model = mlp()
    model[2].requires_grad_(False)
    result = checked((model, adam(model), loader(*classes())), steps=40)
    assert result.check("frozen parameters").detail == "2 of 6 tensors are frozen, 65% of the values: 2.weight, 2.bias"
    assert result.exit_code == 0


def test_the_first_loss_is_compared_with_that_of_equal_chances() -> None:
    seed_everything(0)
    sound = checked(plain(), steps=5, find_lr=False).check("loss at the start")
    assert sound.state == "pass"
    assert sound.numbers["expected"] == pytest.approx(1.609437912)
    model = mlp()
    with torch.no_grad():
        model[4].weight.mul_(60)
    sure = checked((model, adam(model), loader(*classes())), steps=5, find_lr=False).check("loss at the start")
    assert sure.state == "look"
    assert "far above ln(5) = 1.61" in sure.detail


def test_a_policy_has_nothing_to_overfit() -> None:
    seed_everything(0)
    result = checked(HEALTHY["policy"](), steps=40)
    assert result.check("one batch overfits").state == "unknown"


def test_a_game_without_a_loss_gets_the_checks_of_its_parameters() -> None:
    result = checked(HEALTHY["game"]())
    assert result.check("parameters in optimizer").detail == "each of 8 trainable tensors is in one group, 179 values"
    assert result.check("a step runs").state == "unknown"


def test_memory_is_that_of_the_tensors() -> None:
    model = nn.Linear(100, 50, bias=False)
    batch = torch.randn(8, 100)
    result = forewarn.preflight(
        model, torch.optim.Adam(model.parameters()), batch, lambda model, batch: model(batch).square().mean(), steps=3
    )
    numbers = result.check("memory").numbers
    assert numbers["parameters"] == numbers["gradients"] == 100 * 50 * 4
    assert numbers["optimizer"] == 2 * 100 * 50 * 4 + 4  # two moments and a count of steps
    assert numbers["activations"] == 8 * 100 * 4 + 8 * 50 * 4  # the input for the weight, the output for the square


def test_the_duration_is_that_of_all_steps() -> None:
    result = checked(plain(), steps=5, find_lr=False, total_steps=20_000)
    numbers = result.check("time").numbers
    assert numbers["step_seconds"] > 0
    assert "20,000 steps in about" in result.check("time").detail


def test_the_checklist_fits_80_columns() -> None:
    seed_everything(0)
    text = str(checked(plain(), steps=30))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Sequential: ready to train\n")
    assert "▲ suggested" in text or "suggested" in text


def test_an_unknown_check_is_named_with_the_others() -> None:
    with pytest.raises(KeyError, match="there is no check 'rate'; choose from parameters in optimizer"):
        checked(HEALTHY["game"]()).check("rate")


def test_a_schedule_by_a_function_is_tried_at_its_own_peak() -> None:
    seed_everything(0)
    model, _, data = plain()
    optimizer = adam(model, 1.0)  # multiplied by what "Attention is all you need" prescribes
    schedule = lambda step: 0.04 * min((step + 1) ** -0.5, (step + 1) * 400**-1.5)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    result = forewarn.preflight(model, optimizer, data, steps=80)
    assert result.check("learning rate").numbers["present"] == pytest.approx(0.002, rel=0.01)
    assert result.exit_code == 0, str(result)
    assert scheduler.last_epoch == 0


def test_a_matrix_optimizer_with_momentum_decays_no_more_than_it_says() -> None:
    seed_everything(0)
    model = mlp()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.NAdam(others, 2e-3)]
    result = forewarn.preflight(model, optimizers, loader(*classes()), steps=80)
    assert result.exit_code == 0, str(result)


class Recorded(torch.amp.GradScaler):
    """A scaler that notes the scales at which steps were tried."""

    scales: ClassVar[list[float]] = []

    def step(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        Recorded.scales.append(self.get_scale())
        return super().step(optimizer, *args, **options)


def test_a_scaler_is_used_as_a_copy_and_its_skipped_steps_are_no_fault() -> None:
    seed_everything(0)
    model, optimizer, data = plain()
    scaler = Recorded("cpu", init_scale=2.0**127, growth_interval=1000)
    before = scaler.state_dict()
    result = forewarn.preflight(model, optimizer, data, steps=80, scaler=scaler, clip=1.0)
    assert result.exit_code == 0, str(result)
    assert scaler.state_dict() == before
    assert 2.0**80 < min(Recorded.scales) < 2.0**127, "the first scale overflows"
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with forewarn.watch(model, optimizer, views=[], scaler=scaler) as monitor:
        Recorded.scales.clear()
        monitor.preflight(data, steps=5, find_lr=False)
    assert Recorded.scales


def test_several_batches_per_step_have_the_gradient_of_one_large_batch() -> None:
    from forewarn.preflight_checks.twin import twin_of

    seed_everything(0)
    model, inputs = mlp(), classes(48)[0]
    targets = torch.randn(48, 5)
    loss = lambda model, batch: functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    parts = list(zip(inputs.split(12), targets.split(12), strict=True))
    together, apart = (twin_of(model, [torch.optim.SGD(model.parameters(), 0.1)]) for _ in range(2))
    one, several = together.step(loss, (inputs, targets)), apart.step(loss, *parts)
    assert several.item() == pytest.approx(one.item())
    pairs = zip(together.root.parameters(), apart.root.parameters(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    result = forewarn.preflight(model, adam(model), parts, loss, steps=10, accumulate=4)
    assert result.exit_code < 2, str(result)
    with pytest.raises(ValueError, match="accumulate must be a number of batches"):
        forewarn.preflight(model, adam(model), parts, loss, accumulate=0)
