"""The life of a monitor: steps, what is logged by hand, hooks, and what it leaves alone."""

import copy
import functools
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from forewarn import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention
from tests.test_no_host_sync import Counting


def all_hooks(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in hooks.values()
    ]


def test_by_default_every_20th_step_is_monitored(small):
    monitor = ModuleMonitor()
    monitor.set_module(small[0])
    assert [step for step in range(50) if monitor.is_step_monitored(step)] == [0, 20, 40]
    assert monitor.begin_step(0) is True
    assert monitor.is_monitoring()
    monitor.end_step()
    assert not monitor.is_monitoring()
    assert monitor.begin_step(1) is False
    assert not monitor.is_monitoring()


def test_steps_only_go_up_and_a_module_is_needed(small):
    monitor = ModuleMonitor(lambda step: True)
    with pytest.raises(ValueError, match=r"No module to monitor\. Call set_module before begin_step"):
        monitor.begin_step(0)
    with pytest.raises(ValueError, match="Please set the monitored module"):
        monitor.set_reference_module(small[0])
    with pytest.raises(ValueError, match="Module cannot be None"):
        monitor.set_module(None)
    monitor.set_module(small[0])
    with pytest.raises(ValueError, match="Module has already been set!"):
        monitor.set_module(small[0])
    monitor.begin_step(3)
    monitor.end_step()
    monitor.begin_step(3)
    with pytest.raises(ValueError, match="Step 2 cannot be smaller than the current step 3"):
        monitor.begin_step(2)


def test_a_complex_scalar_is_refused_rather_than_cut(small):
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(small[0])
    monitor.begin_step(0)
    with pytest.raises(ValueError, match=r"real number for 'phase', not a tensor of .*; record its abs\(\)"):
        monitor.log_scalar("phase", torch.tensor(1 + 2j))


def test_scalars_are_averaged_or_aggregated_and_forced_ones_need_no_monitored_step(small):
    monitor = ModuleMonitor(lambda step: step == 0)
    monitor.set_module(small[0])
    monitor.begin_step(0)
    for value in (1.0, torch.tensor(2.0), 6):
        monitor.log_scalar("loss", value)
        monitor.log_scalar("worst", value, max)
        monitor.log_scalar("both", value, lambda values: {"[min]": min(values), "[max]": max(values)})
    monitor.log_scalars({"lr": 0.1, "tokens": 5})
    with monitor.no_monitor():
        monitor.log_scalar("loss", 1e9)
        monitor.log_scalar("forced", 7.0, force=True)
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx(
        {"loss": 3.0, "worst": 6.0, "both[min]": 1.0, "both[max]": 6.0, "lr": 0.1, "tokens": 5, "forced": 7.0}
    )
    monitor.begin_step(1)
    monitor.log_scalar("loss", 4.0)
    monitor.log_scalars({"evaluation": 1.0, "other": torch.tensor([2.0])}, force=True)
    monitor.log_scalar("evaluation", 3.0, force=True)
    assert monitor.get_step_metrics() == {"evaluation": 2.0, "other": 2.0}
    monitor.end_step()
    monitor.log_scalar("late", 1, force=True)
    assert monitor.get_all_metrics()[1] == {"evaluation": 2.0, "other": 2.0, "late": 1.0}


@pytest.mark.parametrize("value", ["text", None, torch.ones(2)])
def test_what_is_no_number_is_an_error(small, value):
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(small[0])
    monitor.begin_step(0)
    with pytest.raises(ValueError, match="takes one number for 'loss'"):
        monitor.log_scalar("loss", value)


def test_a_logged_tensor_is_averaged_over_all_its_elements_and_may_change_afterwards(small):
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(small[0])
    monitor.begin_step(0)
    for tensor in (torch.tensor([1.0, 2.0]), torch.tensor(6.0)):
        monitor.log_tensor("values", tensor)
        monitor.log_tensor("most", tensor, torch.max)
        tensor.fill_(100.0)
    monitor.log_tensor("whole", torch.tensor([True, False, True, True]))
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx({"values": 3.0, "most": 6.0, "whole": 0.75})


def test_nothing_is_monitored_within_no_monitor(small):
    model, _ = small
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), "0")
    monitor.begin_step(0)
    model(torch.ones(2, 4))
    with monitor.no_monitor():
        with monitor.no_monitor():
            model(torch.full((2, 4), 100.0))
        assert not monitor.is_monitoring()
        model(torch.full((2, 4), 100.0))
        monitor.monitor_gradients()
    assert monitor.is_monitoring()
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx({"activation/0/mean": model[0](torch.ones(2, 4)).mean().item()})


def test_hooks_are_there_on_monitored_steps_only_and_none_is_left_after_close(small):
    model, _ = small
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor(lambda step: step == 1)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.begin_step(0)
    assert not all_hooks(model)
    monitor.begin_step(1)
    assert all_hooks(model)
    assert all_hooks(reference)
    monitor.close()
    assert not all_hooks(model)
    assert not all_hooks(reference)
    monitor.close()
    with monitor:
        monitor.set_module(model)
        monitor.begin_step(1)
        assert all_hooks(model)
    assert not all_hooks(model)


def test_after_close_the_reference_and_its_activations_are_released(small):
    model, _ = small
    reference = copy.deepcopy(model)
    kept = []
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_difference_metric("norm", lambda x, y: kept.append(weakref.ref(y)) or (x - y).norm())
    monitor.begin_step(0)
    reference(torch.ones(2, 4))
    model(torch.ones(2, 4))
    alive = weakref.ref(reference)
    monitor.close()
    del reference
    gc.collect()
    assert len(kept) == 4
    assert alive() is None
    assert not any(each() is not None for each in kept)


def test_a_copy_or_a_pickle_of_a_monitored_model_logs_nowhere(small):
    model, _ = small
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("count", lambda x: 1.0, "0", lambda values: len(values))
    monitor.begin_step(0)
    copy.deepcopy(model)(torch.ones(2, 4))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.ones(2, 4))
    model(torch.ones(2, 4))
    monitor.end_step()
    assert monitor.get_step_metrics() == {"activation/0/count": 1}


def train(monitored: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 2))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = ModuleMonitor(lambda step: step % 2 == 0)
    if monitored:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        monitor.add_activation_metric("mean", lambda x: x.mean())
        monitor.add_activation_metric("std")
        monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm(dim=-1))
        monitor.add_parameter_metric("norm", lambda x: x.norm())
        monitor.add_parameter_difference_metric("norm")
        monitor.add_gradient_metric("norm")
    losses = []
    for step in range(30):
        measuring = monitored and monitor.begin_step(step)
        for _ in range(2):
            x = torch.randn(8, 4)
            state = torch.get_rng_state()
            if measuring:
                with torch.no_grad():
                    reference(x)
                torch.set_rng_state(state)  # the reference's own dropout draws numbers, the monitor does not
            loss = model(x).square().mean()
            loss.backward()
            monitor.after_micro_batch()
        if measuring:
            monitor.monitor_gradients()
            monitor.monitor_parameters()
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
        losses.append(loss.item())
    return losses, model.state_dict(), torch.get_rng_state()


def test_training_is_bit_identical_with_the_monitor_dropout_included():
    bare, monitored = train(False), train(True)
    assert bare[0] == monitored[0]
    assert all(torch.equal(bare[1][key], monitored[1][key]) for key in bare[1])
    assert torch.equal(bare[2], monitored[2])


class LogsProducts(MonitorMixin, nn.Module):
    """Logs what costs matrix products of its own, from inside its forward."""

    def forward(self, x):
        if self.is_monitoring:
            monitor = self.get_module_monitor()
            monitor.monitor_activations("by hand", x)
            monitor_scaled_dot_product_attention(monitor, self, *3 * [x[None]])
        return x.tanh()


def test_gradients_survive_selective_checkpointing():
    """It hands out what the forward kept as "the third `mm`": a metric's own `mm` in between must not count."""

    def policy(context, operation, *args, **kwargs):
        save = operation in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(nn.Sequential):
        def forward(self, x):
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    linear = functools.partial(nn.Linear, 4, 4, bias=False)
    layers = [linear(), LogsProducts(), linear(), LogsProducts(), linear()]
    x = torch.randn(3, 4)
    bare = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), layers[0].weight)[0]
    model = Selective(*layers)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("gram", lambda y: (y @ y.mT).sum())
    monitor.begin_step(0)
    model(x).square().sum().backward()
    monitor.end_step()
    assert torch.equal(layers[0].weight.grad, bare)
    found = monitor.get_step_metrics()
    assert {"activation/by hand/gram", "activation/1.head_0.key/gram", "attention_entropy/3.head_0"} < found.keys()


@pytest.mark.parametrize("built_in", [False, True])
def test_nothing_is_waited_for_before_the_end_of_a_step_and_then_once(built_in):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(150)])
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", "mean" if built_in else lambda x: x.mean())
    monitor.add_gradient_metric("norm", "norm" if built_in else lambda x: x.norm())
    monitor.add_parameter_metric("norm", "norm" if built_in else lambda x: x.norm())
    monitor.begin_step(0)
    with Counting() as counting:
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    with Counting() as measuring:
        monitor.monitor_gradients()
        monitor.monitor_parameters()
    assert counting.syncs == measuring.syncs == 0
    if built_in:
        assert measuring.operations.total() <= 2 * 600  # an alias of each tensor: nothing is computed by torch
    with Counting() as ending:
        monitor.end_step()
    assert ending.syncs == 0
    assert ending.operations.total() < 10  # the few hundred numbers travel as one
    assert len(monitor.get_step_metrics()) == 151 + 300 + 300


def test_no_activation_is_copied_where_nothing_is_compared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(copy.deepcopy(model))
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_difference_metric("norm", lambda x, y: (x - y).norm(), "1")
    monitor.begin_step(0)
    with torch.no_grad(), Counting() as counting:
        monitor.reference_module(torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert counting.operations["clone"] == 1
