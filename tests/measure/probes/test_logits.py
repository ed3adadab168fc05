"""The log-normaliser of the output: read where the output is logits, and only there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.measure.probes.logits import LogitsProbe, output_logits
from forewarn.measure.step import Step
from tests.conftest import last

X, TARGETS = torch.linspace(-2, 2, 60).reshape(12, 5), torch.arange(12) % 4


def net(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, outputs))
    with torch.no_grad():
        model[2].weight.mul_(5.0)
    return model


def one_step(model, watch, loss_of, batches=(slice(None),)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    for batch in batches:
        loss_of(model(X[batch]), TARGETS[batch]).backward()
    optimizer.step()
    monitor.step(1.0)
    return monitor


def log_z(logits: Tensor) -> float:
    powers = np.exp(logits.detach().double().numpy())
    return float(np.log(powers.sum(-1)).mean())


SOFTMAX = {
    "cross-entropy": functional.cross_entropy,
    "with smoothed labels": lambda logits, targets: functional.cross_entropy(logits, targets, label_smoothing=0.1),
    "with ignored rows": lambda logits, targets: functional.cross_entropy(logits, targets.where(targets > 0, -100)),
    "with a z-loss": lambda logits, targets: (
        functional.cross_entropy(logits, targets) + 1e-4 * logits.logsumexp(-1).square().mean()
    ),
    "in bfloat16": lambda logits, targets: functional.cross_entropy(logits.bfloat16(), targets).float(),
    "scaled": lambda logits, targets: functional.cross_entropy(logits, targets) * 65536,
    "distillation": lambda logits, targets: functional.kl_div(
        logits.log_softmax(-1), torch.full_like(logits, 0.25), reduction="batchmean"
    ),
}
OTHERS = {
    "squares": lambda output, targets: (output - 1000.0).square().mean(),
    "one against all": lambda output, targets: functional.binary_cross_entropy_with_logits(
        output, functional.one_hot(targets, 4).float()
    ),
    "sum": lambda output, targets: output.sum(),
    "log-probabilities": lambda output, targets: functional.nll_loss(output, targets),
    "no gradient": lambda output, targets: (0 * output).sum(),
}


@pytest.mark.parametrize("loss_of", SOFTMAX.values(), ids=SOFTMAX)
def test_it_is_read_where_the_loss_is_by_softmax(loss_of, watch):
    model = net()
    monitor = one_step(model, watch, loss_of)
    assert last(monitor, "activation/log_z") == pytest.approx(log_z(model(X)), rel=1e-6)


@pytest.mark.parametrize("loss_of", OTHERS.values(), ids=OTHERS)
def test_it_is_not_read_where_the_loss_is_another(loss_of, watch):
    assert "activation/log_z" not in one_step(net(), watch, loss_of).history


def test_a_wide_output_that_is_reconstructed_is_not_taken_for_logits(watch):
    torch.manual_seed(0)
    targets = torch.randn(12, 20_000)
    monitor = one_step(net(20_000), watch, lambda output, _: (output - targets).square().mean())
    assert "activation/log_z" not in monitor.history


def test_micro_batches_of_any_size_add_up_to_the_whole_batch(watch):
    model = net()
    parts = [slice(0, 1), slice(1, 9), slice(9, 12)]
    monitor = one_step(model, watch, functional.cross_entropy, parts)
    assert last(monitor, "activation/log_z") == pytest.approx(log_z(model(X)), rel=1e-6)


def test_a_model_that_gives_only_its_loss_is_read_at_its_last_linear_layer(watch):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=7, context=12, depth=1, heads=2, width=8))
    tokens = torch.arange(24).reshape(2, 12) % 7
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    for _ in range(2):
        model(tokens, tokens.roll(-1)).backward()
        optimizer.step()
        monitor.step(1.0)
    assert len(monitor.history.series("activation/log_z")) == 1, "the first pass showed that there was nothing to see"
    assert last(monitor, "activation/log_z") == pytest.approx(log_z(model(tokens)), rel=1e-5)


class Copied(torch.autograd.Function):
    """Returns copies and passes on missing gradients as None, as DDP and compiled code do."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


class WithLoss(nn.Module):
    """Makes the loss itself and returns the logits as well."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.net, self.copied = net(), copied

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        logits = self.net(x)
        outputs = (logits, functional.cross_entropy(logits, targets))
        return Copied.apply(*outputs) if self.copied else outputs


@pytest.mark.parametrize("how", ["plain", "copied", "compiled"])
def test_logits_that_are_returned_unused_are_read_at_the_last_linear_layer(how, watch):
    inner = WithLoss(how == "copied")
    model = torch.compile(inner, backend="aot_eager") if how == "compiled" else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    for _ in range(3):
        model(X, TARGETS)[1].backward()
        optimizer.step()
        monitor.step(1.0)
    assert "X101" not in {alert.code for alert in monitor.alerts}
    readings = monitor.history.series("activation/log_z").values
    assert len(readings) == {"plain": 3, "copied": 2, "compiled": 0}[how], "compiled code has no layers to look at"
    assert readings == pytest.approx(log_z(inner.net(X)), rel=1e-6)


def test_an_unused_micro_batch_does_not_count(watch):
    """The first of these forward passes has no gradient; the reading is that of the second alone."""
    model = nn.Sequential(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = watch(model, optimizer)
    model(10 * X)
    functional.cross_entropy(model(X), TARGETS).backward()
    optimizer.step()
    monitor.step(1.0)
    assert last(monitor, "activation/log_z") == pytest.approx(log_z(model(X)), rel=1e-6)


def test_a_large_output_is_read_in_evenly_spaced_rows(watch, monkeypatch):
    monkeypatch.setattr("forewarn.measure.probes.logits._MAX_VALUES", 12)
    monkeypatch.setattr("forewarn.measure.probes.logits._FEWEST_ROWS", 4)
    model = net()
    monitor = one_step(model, watch, functional.cross_entropy)
    assert last(monitor, "activation/log_z") == pytest.approx(log_z(model(X)[::3]), rel=1e-6)


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def test_logits_are_found_in_what_models_give():
    logits = torch.ones(2, 3, requires_grad=True) * 1
    states = torch.ones(2, 5, requires_grad=True) * 1
    assert output_logits(logits) is logits
    assert output_logits((logits.sum(), logits, states)) is logits
    assert output_logits({"hidden": states, "logits": logits}) is logits
    assert output_logits(Output(logits.sum(), logits)) is logits
    for nothing in (
        None,
        3,
        "text",
        logits.sum(),
        logits[:, :1],
        logits[0],
        logits.detach(),
        logits[:0],
        {"a": logits},
    ):
        assert output_logits(nothing) is None


def test_what_fails_in_the_backward_pass_reaches_the_monitor_only(watch, monkeypatch, caplog):
    monkeypatch.setattr("forewarn.measure.probes.logits._shift", lambda rows: 1 / 0)
    model = net()
    monitor = one_step(model, watch, functional.cross_entropy)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert ("X101", "logits") in {alert.identity for alert in monitor.alerts}


def test_without_a_backward_pass_nothing_is_said():
    probe = LogitsProbe(net())
    probe.forward_begins()
    probe.forward_ended(net()(X))
    assert probe.collect(Step(measured=True)) is None
    assert probe.collect(Step(measured=True)) is None
