"""The same keys and the same values as the public package torch-module-monitor, side by side on the same runs."""

import copy
import math

import pytest
import torch
from torch.nn import functional

import forewarn
from forewarn.lab.gpt import GPT, GPTConfig, token_loss
from forewarn.lab.networks import CNN, MLP

public = pytest.importorskip("torch_module_monitor")

STEPS, MICRO_BATCHES = 20, 3


def mlp():
    return MLP([6, 16, 16, 3]), lambda: (torch.randn(5, 6), torch.randint(3, (5,))), functional.cross_entropy


def cnn():
    return CNN([1, 4, 8], 3), lambda: (torch.randn(4, 1, 8, 8), torch.randint(3, (4,))), functional.cross_entropy


def gpt():
    model = GPT(GPTConfig(vocab_size=32, context=12, depth=2, heads=2, width=16, dropout=0.1))
    return model, lambda: (torch.randint(32, (3, 12)), torch.randint(32, (3, 12))), token_loss


def prepare(monitor, model, reference):
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("std", lambda x: x.std())
    monitor.add_activation_metric("vector_norm", lambda x: x.norm(dim=-1))
    monitor.add_activation_metric(
        "spread", lambda x: x.amax(-1), ".*(head|norm)", lambda v: {"[max]": v.max().item(), "": v.mean().item()}
    )
    monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm(dim=-1))
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_parameter_metric("largest", lambda x: x.abs().max().item(), r".*weight")
    monitor.add_parameter_difference_metric("norm", lambda x, y: (x - y).norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("mean", lambda x: x.mean(), r".*bias")


@pytest.mark.parametrize("make", [mlp, cnn, gpt])
def test_every_key_and_value_is_that_of_the_public_package(make):
    torch.manual_seed(0)
    model, batch, criterion = make()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The GPT calls one Dropout twice in a block, which the public package refuses to compare with a reference.
    monitors = [
        each(monitor_step_fn=lambda step: step % 3 != 1, excluded_modules_regex=r".*dropout")
        for each in (forewarn.ModuleMonitor, public.ModuleMonitor)
    ]
    for each in monitors:
        prepare(each, model, reference)
    for step in range(STEPS):
        assert len({each.begin_step(step) for each in monitors}) == 1
        for _ in range(MICRO_BATCHES):
            x, y = batch()
            with torch.no_grad():
                reference(x)
            loss = criterion(model(x), y)
            loss.backward()
            for each in monitors:
                each.log_scalar("loss", loss)
                each.log_tensor("logits", loss.detach().expand(2))
                each.after_micro_batch()
        for each in monitors:
            each.monitor_gradients(before_clip=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for each in monitors:
            each.monitor_gradients()
            each.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        for each in monitors:
            each.end_step()
    ours, theirs = (each.get_all_metrics() for each in monitors)
    assert list(ours) == list(theirs)
    for step, metrics in theirs.items():
        assert set(ours[step]) == set(metrics)
        for key, value in metrics.items():
            assert math.isclose(ours[step][key], value, rel_tol=1e-5, abs_tol=1e-6), (step, key, ours[step][key], value)
    kinds = {key.split("/")[0] for key in ours[0]}
    assert kinds == {
        "activation", "activation_difference", "gradient", "gradient_before_clip", "logits", "loss", "parameter",
        "parameter_difference",
    }  # fmt: skip
