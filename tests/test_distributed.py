"""Several processes: the first one measures and records, and what it reads is true."""

import contextlib
import copy
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forewarn
from forewarn.measure.transfer import Transfer
from forewarn.types import Reason
from tests.processes import in_processes, in_two_processes, skip_without_fsdp2


def train(rank: int, folder: str, clip: bool, view: bool) -> None:
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), gradient_as_bucket_view=view
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    norms = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        loss.backward()
        norms.append(math.sqrt(sum(each.grad.double().square().sum().item() for each in model.parameters())))
        if clip:
            monitor.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    if rank == 0:
        with forewarn.open_run(f"{folder}/run") as run:
            assert run.series("gradient/global_norm").values.tolist() == pytest.approx(norms, rel=1e-5)
            assert run.scopes("gradient/norm") == ("0.weight", "0.bias", "2.weight", "2.bias")
    else:
        assert monitor.history.names() == []


@pytest.mark.parametrize(("clip", "view"), [(False, False), (False, True), (True, False)])
def test_under_ddp_the_norm_is_that_of_the_averaged_gradients(tmp_path, clip, view):
    in_two_processes(train, str(tmp_path), clip, view)


def train_sharded(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    twin.load_state_dict(model.state_dict())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    x = torch.ones(2, 4)
    twin(x).square().mean().backward()
    true = math.sqrt(sum(each.grad.double().square().sum().item() for each in twin.parameters()))
    loss = model(x).square().mean()
    loss.backward()
    monitor.clip_grad_norm_(10.0)
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(loss)
    monitor.close()
    if rank == 0:
        assert not monitor.alerts, monitor.alerts
        assert monitor.history.series("gradient/global_norm").last == pytest.approx(true, rel=1e-5)
        assert monitor.history.series("update/ratio", "0.weight").last > 0
        assert monitor.history.series("monitor/unavailable", "gradient/noise_scale").last == Reason.RANK_GRADIENT_UNSEEN


def test_under_fsdp2_clipping_gives_the_whole_norm_and_nothing_fails(tmp_path):
    skip_without_fsdp2()
    in_two_processes(train_sharded, str(tmp_path))


def train_with_metrics(rank: int, folder: str, how: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))  # in two shards, of which one is empty
    reference = copy.deepcopy(plain).eval()
    twin = copy.deepcopy(plain)
    metrics = [
        forewarn.ActivationMetric("norm"),
        forewarn.ActivationMetric("mean", lambda x: x),
        forewarn.ActivationDifferenceMetric("norm", reference=reference),
        forewarn.GradientMetric("norm", healthy=(None, 1e-9)),
        forewarn.GradientMetric("largest", lambda x: x.abs().max(), reduce="max"),
        forewarn.ParameterMetric("size", lambda x: x.norm(), reduce="l2"),
        forewarn.ParameterDifferenceMetric("abs_max"),
        forewarn.ParameterDifferenceMetric("moved", "norm", reference=reference),
    ]
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"0.weight is sharded, and 'size' does not say how to combine"):
            forewarn.watch(model, optimizer, f"{folder}/no", metrics=[forewarn.ParameterMetric("size", torch.norm)])
    else:
        model = DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[], metrics=metrics)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(4):  # the twin trains on the batches of both ranks
        both = [torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(2)]
        loss = model(both[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs = [twin(x) for x in both]
        twin_optimizer.zero_grad()
        torch.cat(outputs).square().mean().backward()
        twin_optimizer.step()
        monitor.step(loss)
    monitor.close()
    if rank == 0:
        norms = [output.norm().item() for output in outputs]
        apart = [(output - reference(x)).norm().item() for output, x in zip(outputs, both, strict=True)]
        moved = (twin[0].weight - reference[0].weight).detach()
        expected = {
            ("activation_metric/norm", "[root module]"): sum(norms) / 2,
            ("activation_metric/mean", "[root module]"): torch.cat(outputs).mean().item(),
            ("activation_difference_metric/norm", "[root module]"): sum(apart) / 2,
            ("gradient_metric/norm", "0.weight"): twin[0].weight.grad.norm().item(),
            ("gradient_metric/largest", "0.weight"): twin[0].weight.grad.abs().max().item(),
            ("gradient_metric/norm", "2.bias"): twin[2].bias.grad.norm().item(),
            ("parameter_metric/size", "0.weight"): twin[0].weight.norm().item(),
            ("parameter_metric/size", "2.bias"): twin[2].bias.norm().item(),
            ("parameter_difference_metric/abs_max", "0.weight"): moved.abs().max().item(),
            ("parameter_difference_metric/moved", "0.weight"): moved.norm().item(),
        }
        assert {key: monitor.history.series(*key).last for key in expected} == pytest.approx(expected, rel=1e-4)
        assert {alert.code for alert in monitor.alerts} == {"M102"}
    else:
        assert monitor.history.names() == []


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_metrics_of_ones_own_are_those_of_all_ranks(tmp_path, how):
    if how == "fsdp2":
        skip_without_fsdp2()
    in_two_processes(train_with_metrics, str(tmp_path), how)


def train_alone(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = forewarn.ParameterMetric("size", torch.norm, reduce="l2")
    metrics = [size, forewarn.GradientMetric("sum", torch.sum, reduce="sum")]
    with forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[], metrics=metrics) as monitor:
        model(torch.ones(3, 4)).square().mean().backward()
        total = model.weight.grad.to_local().sum().item()
        optimizer.step()
        monitor.step(1.0)
    norm = model.weight.to_local().norm().item()
    assert monitor.history.series("parameter_metric/size", "weight").last == pytest.approx(norm)
    assert monitor.history.series("gradient_metric/sum", "weight").last == pytest.approx(total)


def test_one_process_holds_whole_parameters_under_fsdp2_too(tmp_path):
    skip_without_fsdp2()
    in_processes(1, train_alone, str(tmp_path))


def train_tasks(rank: int, folder: str, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model, static_graph=how == "static")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        output = model(torch.randn(8, 4, generator=generator))
        losses = {"a": output[:, 0].square().mean(), "b": (output[:, 1] - 1).square().mean()}
        loss = monitor.combine_losses(losses, every=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    weights = [each.detach().clone() for each in model.parameters()]
    if how != "fsdp2":  # the ranks still agree: nothing of the monitor's own went into the reduction
        for each in weights:
            mine = each.clone()
            dist.broadcast(each, 0)
            assert torch.equal(mine, each)
    monitor.close()
    if rank == 0:
        reason = monitor.history.series("monitor/unavailable", "task/gradient_norm").last
        assert (reason == Reason.STATIC_GRAPH) if how == "static" else math.isnan(reason)
        assert ("task/gradient_norm" in monitor.history) is (how != "static")
        assert monitor._loop.failures == {}


@pytest.mark.parametrize("how", ["ddp", "static", "fsdp2"])
def test_tasks_are_compared_only_where_that_is_safe(tmp_path, how):
    if how == "fsdp2":
        skip_without_fsdp2()
    in_two_processes(train_tasks, str(tmp_path), how)


def accumulate(rank: int, folder: str, how: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if how == "sharded":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(plain)
    else:
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watched = plain if how == "inner model" else model  # Hugging Face's callbacks get the model inside the wrapper
    monitor = forewarn.watch(watched, optimizer, f"{folder}/run", every=1, views=[])
    for _ in range(4):
        for number in range(3):
            alone = how in ("no_sync", "inner model") and number < 2
            with model.no_sync() if alone else contextlib.nullcontext():
                loss = model(torch.ones(2, 4) * (rank + 1)).square().mean()
                loss.backward()
        monitor.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    if rank == 0:
        assert monitor.history.series("gradient/backward_passes").last == 3
        assert ("gradient/accumulation_growth" in monitor.history) == (how == "synced")
        if how == "synced":
            assert monitor.history.series("gradient/accumulation_growth").last == pytest.approx(3, rel=1e-5)


@pytest.mark.parametrize("how", ["synced", "no_sync", "inner model", "sharded"])
def test_micro_batches_are_compared_only_where_their_gradients_are_those_of_all_ranks(tmp_path, how):
    if how == "sharded":
        skip_without_fsdp2()
    in_two_processes(accumulate, str(tmp_path), how)


class WithLoss(nn.Module):
    """Makes the loss itself and returns the logits as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.idle = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits, targets)


def train_with_unused_logits(rank: int, folder: str) -> None:
    model = DistributedDataParallel(WithLoss(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    x, targets = torch.arange(24.0).reshape(6, 4) / 10, torch.arange(6) % 3
    for _ in range(3):
        logits, loss = model(x, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    if rank == 0:
        assert "X101" not in {alert.code for alert in monitor.alerts}
        log_z = logits.detach().double().logsumexp(-1).mean().item()
        assert monitor.history.series("activation/log_z").values.tolist() == pytest.approx([log_z] * 2, rel=1e-6)


def test_under_ddp_a_model_that_returns_its_logits_unused_is_read_like_any_other(tmp_path):
    in_two_processes(train_with_unused_logits, str(tmp_path))


class Lagging(Transfer):
    """As from an accelerator: values arrive two steps late, unless somebody waits for them."""

    def receive(self, wait=False):
        held = [] if wait else [self._queue.pop() for _ in range(min(2, len(self._queue)))]
        received = super().receive(wait)
        self._queue.extend(reversed(held))
        return received


def stop_with_a_lag(rank: int, folder: str) -> None:
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[])
    while not monitor._exchange.has_met:
        time.sleep(0.01)
    if rank == 1:
        monitor._transfer = Lagging()
    ended = -1
    for step in range(500):
        loss = monitor.combine_losses(
            {"a": model(torch.ones(2, 4)).mean() + 3, "b": model(torch.ones(2, 4)).square().mean()},
            balance="uncertainty",
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
        if step == 10:
            monitor.adjust()
        if step == 20 and rank == 0:
            monitor._ask_to_stop()
        if monitor.should_stop:
            ended = step
            break
        dist.barrier()  # both then leave the loop at the same step, or one waits here for ever
    steps: list[int] = [-1, -1]
    dist.all_gather_object(steps, ended)
    assert steps[0] == steps[1] > 20
    assert not monitor._exchange.off
    monitor.close()


def test_ranks_act_at_the_same_step_although_the_values_of_one_arrive_later(tmp_path):
    in_two_processes(stop_with_a_lag, str(tmp_path))
