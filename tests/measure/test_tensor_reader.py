"""Histograms, percentiles and shapes of real training steps, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.histograms import PERCENTS
from forewarn.measure.engine.distributions import whole_tensors
from forewarn.measure.probe import Histograms
from forewarn.measure.tensor_reader import Statistics, TensorReader, power_of_two
from forewarn.measure.transfer import on_host
from forewarn.types import Distribution, Reason, Shape
from tests.measure.engine.distributions.made import histogram, ranked
from tests.test_no_host_sync import Counting

FULL = forewarn.Config(measure=forewarn.Measure(histograms="full"))


class Seen:
    """A view that keeps what it is shown."""

    def __init__(self) -> None:
        self.distributions: list[Distribution] = []
        self.values: dict[str, dict[str, float]] = {}
        self.order: list[str] = []

    def show_histograms(self, step, distributions):
        self.order.append("histograms")
        self.distributions += distributions

    def show(self, step, blocks, changed, taken):
        self.order.append("step")
        self.values = {block.name: dict(zip(block.scopes, block.values.tolist(), strict=True)) for block in blocks}

    def close(self): ...

    def counted(self, name: str, scope: str) -> tuple[np.ndarray, int]:
        found = next(each for each in reversed(self.distributions) if each.name == name)
        at = found.scopes.index(scope)
        return found.counts[at], int(found.zeros[at])


def model_and_gradients():
    """A model that has its gradients, some of them zero, one of them not there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.LayerNorm(300), nn.Linear(300, 20))
    model[1].unused = nn.Parameter(torch.zeros(3))
    model(torch.randn(8, 40)).square().mean().backward()
    return model


def read(statistics: Statistics):
    readings = list(statistics.readings("weight", tuple(str(at) for at in range(len(statistics.rows)))))
    values = {each.name.partition("/")[2]: each.values for each in readings if not isinstance(each, Histograms)}
    return values, [each for each in readings if isinstance(each, Histograms)]


def statistics(tensors, reader: TensorReader) -> Statistics:
    visit = reader.read(tensors)
    return visit.decode([on_host(one) for one in visit.tensors])


def test_gradients_and_weights_are_counted_value_by_value(watch):
    model = model_and_gradients()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), Seen()
    monitor = watch(model, optimizer, config=FULL, views=[seen])
    gradients = {name: one.grad.numpy().copy() for name, one in model.named_parameters() if one.grad is not None}
    optimizer.step()
    monitor.step(1.0)
    assert seen.order == ["histograms", "step"]
    assert {each.name for each in seen.distributions} == {"gradient/histogram", "weight/histogram"}
    weights = {name: one.detach().numpy() for name, one in model.named_parameters()}
    for name, tensors in (("gradient/histogram", gradients), ("weight/histogram", weights)):
        family = name.partition("/")[0]
        for scope, tensor in tensors.items():
            counts, zeros = seen.counted(name, scope)
            expected, expected_zeros = histogram(tensor)
            assert np.array_equal(counts, expected[0])
            assert zeros == expected_zeros[0]
            for quantity, percent in PERCENTS.items():
                true, found = ranked(tensor, percent), seen.values[f"{family}/{quantity}"][scope]
                assert abs(true) / 2.001 <= abs(found) <= abs(true) * 2.001
    assert seen.counted("gradient/histogram", "1.unused")[0].sum() == 0
    assert np.isnan(seen.values["gradient/p50"]["1.unused"])
    assert np.isnan(seen.values["gradient/shape"]["1.unused"])
    assert seen.values["weight/shape"]["2.weight"] == Shape.SHIFTED
    assert seen.values["weight/shape"]["3.weight"] == Shape.HEALTHY


def test_without_histograms_nothing_of_them_is_recorded(watch):
    model = model_and_gradients()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), Seen()
    monitor = watch(model, optimizer, config=forewarn.Config(measure=forewarn.Measure(histograms="off")), views=[seen])
    optimizer.step()
    monitor.step(1.0)
    assert seen.order == ["step"]
    assert not {name for name in seen.values if name.endswith(("/p50", "/shape"))}
    assert "gradient/norm" in seen.values


def test_a_sample_stands_for_the_whole_tensor():
    torch.manual_seed(0)
    tensors = [torch.randn(300_000), torch.randn(5000), torch.randn(100) * 1e-3, torch.zeros(20_000)]
    tensors[0][torch.rand(300_000) < 0.3] = 0.0
    values, [found] = read(statistics(tensors, TensorReader(histogram_blocks=16)))
    for at, tensor in enumerate(tensors):
        expected, zeros = histogram(tensor.numpy())
        assert found.zeros[at] == zeros[0]
        assert found.counts[at].sum() == pytest.approx(expected.sum(), abs=64)
        assert values["p75"][at] == pytest.approx(ranked(tensor.numpy(), 75), rel=0.15)
    assert values["shape"].tolist() == [Shape.HEALTHY, Shape.HEALTHY, Shape.HEALTHY, Shape.CONSTANT]


def test_the_sample_of_a_large_embedding_meets_rows_that_have_a_gradient():
    torch.manual_seed(0)
    gradient = torch.zeros(50_000, 64)
    rows = torch.randperm(50_000)[:200]
    gradient[rows] = torch.randn(200, 64)
    values, [found] = read(statistics([gradient], TensorReader(histogram_blocks=16)))
    assert found.zeros[0] == gradient.numel() - 200 * 64
    assert found.counts[0].sum() == pytest.approx(200 * 64, rel=0.01)
    assert values["p50"][0] == 0
    assert values["shape"][0] == Shape.HEALTHY


def test_where_the_sample_saw_only_zeros_nothing_is_claimed():
    tensor = torch.zeros(16 * 4096)
    tensor[5 * 4096 : 6 * 4096] = 1.0  # in a block that is not read
    values, found = read(statistics([tensor], TensorReader(histogram_blocks=4)))
    assert found == []
    assert np.isnan(values["p50"][0])


def test_exact_percentiles_are_those_of_the_sorted_values(watch):
    model = model_and_gradients()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), Seen()
    config = forewarn.Config(measure=forewarn.Measure(histograms="off", exact_percentiles=True))
    monitor = watch(model, optimizer, config=config, views=[seen])
    gradients = {name: one.grad.numpy().copy() for name, one in model.named_parameters() if one.grad is not None}
    optimizer.step()
    monitor.step(1.0)
    for quantity, percent in PERCENTS.items():
        for scope, tensor in gradients.items():
            assert seen.values[f"gradient/{quantity}"][scope] == ranked(tensor, percent)
        assert seen.values[f"weight/{quantity}"]["3.bias"] == ranked(model[3].bias.detach().numpy(), percent)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-3, 3000.0])
def test_a_loss_scale_is_taken_out_or_the_histogram_is_not_there(scale):
    torch.manual_seed(0)
    tensors = [torch.randn(2000) * 1e-4, torch.zeros(5)]
    scaled = statistics([one * scale for one in tensors], TensorReader(1, exact=True)).over(scale)
    plain = statistics(tensors, TensorReader(1, exact=True))
    if power_of_two(scale) is None:
        assert scaled.counts.sum() == 0
    else:
        assert np.array_equal(scaled.counts, plain.counts)
    assert scaled.exact == pytest.approx(plain.exact, rel=1e-6)


@pytest.mark.parametrize("init_scale", [2.0**12, 1000.0])
def test_scaled_gradients_of_a_fused_optimizer(watch, init_scale):
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    seen = Seen()
    monitor = watch(model, optimizer, scaler=scaler, config=FULL, views=[seen])
    loss = model(torch.randn(8, 30)).square().mean()
    (true,) = torch.autograd.grad(loss, model.weight, retain_graph=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    monitor.step(loss)
    if power_of_two(init_scale) is None:
        assert seen.values["monitor/unavailable"]["gradient/histogram"] == Reason.UNEVEN_SCALE
        assert np.isnan(seen.values["gradient/p50"]["weight"])
        assert [each.name for each in seen.distributions] == ["weight/histogram"]
    else:
        assert np.array_equal(seen.counted("gradient/histogram", "weight")[0], histogram(true.numpy())[0][0])
        assert seen.values["gradient/p95"]["weight"] == pytest.approx(ranked(true.numpy(), 95), rel=0.3)


def test_several_optimizers_fill_one_histogram_block(watch):
    model = model_and_gradients()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[3], model[0])]
    seen = Seen()
    monitor = watch(model, optimizers, config=FULL, views=[seen])
    first, last = model[0].weight.grad.clone(), model[3].weight.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    monitor.step(1.0)
    assert np.array_equal(seen.counted("gradient/histogram", "0.weight")[0], histogram(first.numpy())[0][0])
    assert np.array_equal(seen.counted("gradient/histogram", "3.weight")[0], histogram(last.numpy())[0][0])
    assert seen.counted("gradient/histogram", "2.weight")[0].sum() == 0


def test_micro_batches_are_counted_as_the_sum_that_the_optimizer_uses(watch):
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), Seen()
    monitor = watch(model, optimizer, config=FULL, views=[seen])
    for _ in range(3):
        model(torch.randn(4, 30)).square().mean().backward()
    gradient = model.weight.grad.numpy().copy()
    optimizer.step()
    monitor.step(1.0)
    assert np.array_equal(seen.counted("gradient/histogram", "weight")[0], histogram(gradient)[0][0])


def test_values_that_are_not_finite_are_in_no_bin():
    tensor = torch.randn(500)
    tensor[:50], tensor[50:60] = float("nan"), float("inf")
    values, [found] = read(statistics([tensor, torch.full((9,), float("nan"))], TensorReader(1)))
    assert np.array_equal(found.counts[0], histogram(tensor.numpy())[0][0])
    assert found.counts[1].sum() == found.zeros[1] == 0
    assert np.isfinite(values["p50"][0])
    assert np.isnan(values["p50"][1])


def test_histograms_add_no_torch_operation():
    tensors = [torch.randn(100) for _ in range(50)]
    with Counting() as counting:
        statistics(tensors, TensorReader(4))
    assert counting.operations.total() == 0


def test_scaled_up_counts_are_whole_numbers_and_the_given_ones_stay_as_they_are():
    counts = np.zeros((1, 2, 64), np.int64)
    counts[0, 1, 40:43] = [10, 20, 3]
    before = counts.copy()
    found, zeros = whole_tensors(counts, np.array([[150.0, 0, 0, 0, 0, 18.0, 0]]))
    assert np.array_equal(counts, before)
    assert found[0, 1, 40:43].tolist() == [40, 80, 12]
    assert zeros.tolist() == [18]
