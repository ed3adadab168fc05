"""The last hidden state and the state of batch normalisation, against numpy and by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from forewarn.measure.engine import native
from forewarn.measure.engine.similarity import joined, similarity
from forewarn.measure.probes.representation import MAX_ROWS
from forewarn.types import BatchNormState
from tests.conftest import last


def by_numpy(rows):
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    pairs = [units[i] @ units[j] for i in range(len(rows)) for j in range(len(rows)) if i != j]
    eigenvalues = np.linalg.eigvalsh(np.cov(rows.T))
    return np.mean(pairs), eigenvalues.sum() ** 2 / (eigenvalues**2).sum()


def train_step(model, optimizer, monitor, *batches):
    for batch in batches:
        model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    monitor.step(1.0)


over_ways = pytest.mark.parametrize(
    "given",
    [
        pytest.param(torch.from_numpy, id="torch"),
        pytest.param(np.asarray, id="native", marks=pytest.mark.skipif(not native.available(), reason="not built")),
    ],
)


@over_ways
@pytest.mark.parametrize("width", [2, 12, 50])
def test_cosine_and_effective_rank_are_those_of_numpy(given, width):
    rows = np.random.default_rng(0).normal(size=(30, width)) * np.arange(1, width + 1) + 0.5
    cosine, rank = similarity(given(rows))
    assert (float(cosine), float(rank)) == pytest.approx(by_numpy(rows))


def test_rows_from_a_device_and_from_the_host_are_joined():
    rows = np.random.default_rng(0).normal(size=(6, 3))
    np.testing.assert_array_equal(joined([rows[:2], torch.from_numpy(rows[2:])]), rows)


@over_ways
@pytest.mark.parametrize(
    ("rows", "cosine", "rank"),
    [
        (torch.ones(9, 5), 1.0, 1.0),
        (torch.eye(6), 0.0, 5.0),
        (torch.outer(torch.arange(1.0, 8.0), torch.ones(3)), 1.0, 1.0),
        (torch.zeros(4, 3), -1 / 3, 1.0),
    ],
)
def test_known_shapes(given, rows, cosine, rank):
    found = similarity(given(rows.double().numpy()))
    assert (float(found[0]), float(found[1])) == pytest.approx((cosine, rank))


def test_the_last_linear_layer_is_found_and_what_it_is_given_is_sampled(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Softplus())
    monitor = watch(model, optimizer := torch.optim.SGD(model.parameters(), 0.0))
    x = torch.randn(2 * MAX_ROWS, 4)
    train_step(model, optimizer, monitor, x)
    assert "activation/row_cosine" not in monitor.history.names(), "the order of the layers was not known before"
    train_step(model, optimizer, monitor, x)
    hidden = model[:2](x).detach().double().numpy()[::2]
    cosine, rank = by_numpy(hidden)
    assert last(monitor, "activation/row_cosine", "2") == pytest.approx(cosine, rel=1e-5)
    assert last(monitor, "activation/effective_rank", "2") == pytest.approx(rank, rel=1e-5)


def test_small_micro_batches_fill_one_sample(watch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    monitor = watch(model, optimizer := torch.optim.SGD(model.parameters(), 0.0))
    parts = torch.randn(40, 4).split(10)
    train_step(model, optimizer, monitor, *parts)
    train_step(model, optimizer, monitor, *parts)
    hidden = model[:2](torch.cat(parts)).detach().double().numpy()
    assert last(monitor, "activation/row_cosine", "2") == pytest.approx(by_numpy(hidden)[0], rel=1e-5)


# ---- batch normalisation ----


def normalized():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def states(monitor):
    return [BatchNormState(int(value)) for value in monitor.history.series("activation/batchnorm_state", "1").values]


def run(watch, model, change=lambda: None, steps=3):
    monitor = watch(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    for step in range(steps):
        if step == 1:
            change()
        train_step(model, optimizer, monitor, torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
    return monitor


def test_batch_normalisation_in_training_follows_its_data(watch):
    assert states(run(watch, normalized())) == [BatchNormState.FOLLOWS] * 3


@pytest.mark.parametrize("whole", [True, False])
def test_evaluation_mode_in_a_training_step_is_seen_in_the_layer_and_in_the_whole_model(watch, whole):
    model = normalized()
    found = run(watch, model, (model if whole else model[1]).eval)
    assert states(found) == [BatchNormState.FOLLOWS, *[BatchNormState.IN_EVALUATION] * 2]
    assert [alert.code for alert in found.alerts if alert.code == "A105"] == ["A105"]


def test_a_layer_that_is_frozen_on_purpose_is_left_alone(watch):
    model = normalized()
    model[1].eval().requires_grad_(False)
    found = run(watch, model)
    assert states(found) == [BatchNormState.ON_PURPOSE] * 3
    assert not [alert for alert in found.alerts if alert.code == "A105"]


def test_running_statistics_that_stand_still_are_seen(watch):
    model = normalized()
    model[1].momentum = 0.0
    found = run(watch, model)
    assert states(found) == [BatchNormState.FOLLOWS, *[BatchNormState.STANDS_STILL] * 2]


def test_without_running_statistics_there_is_nothing_to_follow(watch):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2))
    assert "activation/batchnorm_state" not in run(watch, model).history.names()


def test_a_resumed_run_still_knows_where_the_statistics_were(watch):
    model = normalized()
    model[1].momentum = 0.0
    first = run(watch, model, steps=1)
    state = first.state_dict()
    first.close()
    second = watch(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    second.load_state_dict(state)
    train_step(model, optimizer, second, torch.randn(8, 4))
    assert states(second)[-1] is BatchNormState.STANDS_STILL
