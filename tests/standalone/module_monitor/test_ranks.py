"""Several processes: what each of them sees becomes one value, the same on all."""

import copy
import logging

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from forewarn import ModuleMonitor
from tests.processes import in_two_processes, skip_without_fsdp2


class Collectives:
    """Counts the collectives that torch is asked for."""

    def __init__(self, monkeypatch):
        self.calls = []
        for name in ("all_reduce", "all_gather_object"):
            monkeypatch.setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, call):
        def counted(*args, **kwargs):
            self.calls.append(name)
            return call(*args, **kwargs)

        return counted


def inputs_of(rank, step):
    """Ranks get batches of different sizes."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(3 + 2 * rank, 4, generator=generator) for _ in range(2)]


def make():
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 1))  # in two shards, of which one is empty


def elements_count_alike(rank):
    model = make()
    twin, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(wrapped)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_activation_metric("row_norm", lambda x: x.norm(dim=-1))
    monitor.add_activation_metric("max")
    monitor.add_activation_metric("own_max", lambda x: x, "0", lambda values: values.max())
    monitor.add_gradient_metric("norm", lambda g: g.norm())
    monitor.add_parameter_metric("norm")
    for step in range(2):
        monitor.begin_step(step)
        for x in inputs_of(rank, step):
            wrapped(x).square().mean().backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        monitor.log_scalar("rank", rank)
        with pytest.MonkeyPatch.context() as patch:
            collectives = Collectives(patch)
            monitor.end_step()
        assert collectives.calls == ["all_reduce", "all_reduce", "all_reduce"]  # the agreement, a sum, a maximum
        found = monitor.get_step_metrics()
        everything = [x for each in range(2) for x in inputs_of(each, step)]
        own = twin[0](torch.cat(inputs_of(rank, step)))
        outputs = [twin[0](x).detach() for x in everything]
        assert found["activation/0/mean"] == pytest.approx(np.mean([float(y.mean()) for y in outputs]), rel=1e-5)
        rows = torch.cat(outputs).norm(dim=-1)  # 16 of them, 10 of which rank 1 has seen
        assert found["activation/0/row_norm"] == pytest.approx(float(rows.mean()), rel=1e-5)
        assert found["activation/0/max"] == pytest.approx(np.mean([float(y.max()) for y in outputs]), rel=1e-5)
        assert found["activation/0/own_max"] == pytest.approx(own.max().item(), rel=1e-5)
        assert found["rank"] == rank
        assert found["gradient/0.weight/norm"] == pytest.approx(float(model[0].weight.grad.norm()), rel=1e-5)
        assert found["parameter/2.bias/norm"] == pytest.approx(model[2].bias.norm().item(), rel=1e-5)
        wrapped.zero_grad()


def sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = make()
    nn.init.constant_(model[2].bias, 0.5)
    twin, reference = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for each in reference.parameters():
            each.add_(torch.linspace(0, 1, each.numel()).view_as(each))
    other = copy.deepcopy(reference)
    for each in (model, reference):
        fully_shard(each)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    for add in (monitor.add_gradient_metric, monitor.add_parameter_metric):
        add("norm_by_hand", lambda x: x.norm(), reduce="l2")
        add("sum", lambda x: x.sum(), reduce="sum")
        add("average", lambda x: x.mean(), reduce="mean")
        add("largest", lambda x: x.max(), reduce="max")
        add("unreduced", lambda x: x.norm())
        for built_in in ("norm", "mean", "std", "min", "max"):
            add(built_in)
    monitor.add_parameter_difference_metric("norm")
    monitor.add_parameter_difference_metric("sum", lambda x, y: (x - y).sum(), reduce="sum")
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("forewarn").addHandler(handler)
    monitor.begin_step(0)
    x = inputs_of(0, 0)[0]  # the same on both ranks, so that the twin has the same gradients
    model(x).square().mean().backward()
    twin(x).square().mean().backward()
    with pytest.MonkeyPatch.context() as patch:
        collectives = Collectives(patch)
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        assert not collectives.calls
        monitor.end_step()
    assert collectives.calls == ["all_reduce", "all_reduce", "all_reduce"]
    found = monitor.get_step_metrics()
    assert len(records) == 2
    assert all("reduce='l2'" in each and "'unreduced' failed on 0.weight" in each for each in records), records
    for name, parameter in twin.named_parameters():
        for kind, tensor in (("gradient", parameter.grad), ("parameter", parameter.detach())):
            expected = {
                "norm_by_hand": tensor.norm(), "sum": tensor.sum(), "average": tensor.mean(), "largest": tensor.max(),
                "norm": tensor.norm(), "mean": tensor.mean(), "std": tensor.std(correction=0), "min": tensor.min(),
                "max": tensor.max(),
            }  # fmt: skip
            for metric, value in expected.items():
                assert found[f"{kind}/{name}/{metric}"] == pytest.approx(float(value), rel=1e-5, abs=1e-6), (
                    kind,
                    name,
                    metric,
                )
        difference = parameter.detach() - other.get_parameter(name).detach()
        assert found[f"parameter_difference/{name}/norm"] == pytest.approx(float(difference.norm()), rel=1e-5, abs=1e-6)
        assert found[f"parameter_difference/{name}/sum"] == pytest.approx(float(difference.sum()), rel=1e-5, abs=1e-6)
    assert found["activation/0/mean"] == pytest.approx(twin[0](x).mean().item(), rel=1e-5)
    assert not [key for key in found if "unreduced" in key]


def test_under_fsdp2_shards_make_one_value_by_one_collective_of_each_kind():
    skip_without_fsdp2()
    in_two_processes(sharded)


def a_metric_that_fails_on_one_rank_is_left_out_on_all(rank):
    model = make()
    wrapped = DistributedDataParallel(model)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(wrapped)

    def broken_on_rank_1(x):
        if rank == 1:
            raise ValueError("only here")
        return x.mean()

    monitor.add_activation_metric("broken", broken_on_rank_1)
    monitor.add_activation_metric("mean", lambda x: x.mean(), "0")
    for step in range(2):
        monitor.begin_step(step)
        wrapped(torch.full((1, 4), float(rank)))
        monitor.end_step()
        both = np.mean([float(model[0](torch.full((1, 4), float(each))).detach().mean()) for each in range(2)])
        assert monitor.get_step_metrics() == pytest.approx({"activation/0/mean": both}, rel=1e-5)


def models_of_their_own_are_not_reduced(rank):
    model = make()
    monitor = ModuleMonitor(lambda step: step == 0)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean(), "0")
    if rank == 0:
        monitor.begin_step(0)
        model(torch.ones(1, 4))
        monitor.end_step()
        assert list(monitor.get_step_metrics()) == ["activation/0/mean"]


def replicated(rank):
    elements_count_alike(rank)
    a_metric_that_fails_on_one_rank_is_left_out_on_all(rank)
    models_of_their_own_are_not_reduced(rank)


def test_under_ddp_every_element_of_every_rank_counts_alike_and_a_failure_on_one_harms_nobody():
    in_two_processes(replicated)
