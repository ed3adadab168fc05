"""What the graph behind a loss shows, for losses as people write them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.measure.loss_graph import loss_graph

TARGETS = torch.arange(6) % 3
ONE_HOT = functional.one_hot(TARGETS, 3).float()

LOSSES = {
    "cross entropy": (lambda x: functional.cross_entropy(x, TARGETS), True, ""),
    "label smoothing": (lambda x: functional.cross_entropy(x, TARGETS, label_smoothing=0.1) / 4, True, ""),
    "by hand": (lambda x: -(ONE_HOT * x.log_softmax(1)).sum(1).mean(), True, ""),
    "log of softmax": (lambda x: -torch.log(x.softmax(1)).gather(1, TARGETS[:, None]).mean(), True, ""),
    "softmax twice": (lambda x: functional.cross_entropy(x.softmax(1), TARGETS), True, "softmax"),
    "softmax twice, reshaped": (
        lambda x: 2 * functional.cross_entropy(x.softmax(1).view(3, 2, 3).transpose(0, 1).reshape(-1, 3), TARGETS),
        True,
        "softmax",
    ),
    "log-softmax twice changes nothing": (lambda x: functional.cross_entropy(x.log_softmax(1), TARGETS), True, ""),
    "binary cross entropy": (lambda x: functional.binary_cross_entropy(x.sigmoid(), ONE_HOT), False, ""),
    "with logits": (lambda x: functional.binary_cross_entropy_with_logits(x, ONE_HOT), False, ""),
    "sigmoid twice, with logits": (
        lambda x: functional.binary_cross_entropy_with_logits(x.sigmoid(), ONE_HOT),
        False,
        "sigmoid",
    ),
    "sigmoid twice": (lambda x: functional.binary_cross_entropy(x.sigmoid().sigmoid(), ONE_HOT), False, "sigmoid"),
    "zero mean": (lambda x: (x - x.mean(1, keepdim=True)).square().sum(1).log10().mean(), False, ""),
    "attention inside the model": (lambda x: (x.softmax(1) @ x.T @ x).square().mean(), False, ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_graph_shows_a_softmax_and_one_that_is_applied_twice(name):
    loss_of, has_softmax, twice = LOSSES[name]
    loss = loss_of(torch.randn(6, 3, requires_grad=True) * 2)
    loss.backward()
    graph = loss_graph(loss.grad_fn)
    assert (graph.has_softmax, graph.twice) == (has_softmax, twice)


VALUES = torch.randn(6)


@pytest.mark.parametrize(
    ("loss_of", "num_paired"),
    [
        (lambda out: functional.mse_loss(out, VALUES), 6),
        (lambda out: functional.l1_loss(out, VALUES), 6),
        (lambda out: functional.smooth_l1_loss(out, VALUES) + 0.1 * out.square().mean(), 6),
        (lambda out: (out - VALUES).square().mean(), 6),
        (lambda out: (VALUES[:, None] - out.squeeze(1)).abs().sum(), 6),
        (lambda out: functional.mse_loss(out, VALUES[:, None]), 0),
        (lambda out: (out.squeeze(1) - VALUES).square().mean(), 0),
        (lambda out: (out - VALUES.mean()).square().mean(), 0),
        (lambda out: (out - out.T).relu().mean(), 0),
        (lambda out: (out.expand(6, 6) + out.expand(6, 6).T).clamp(min=1e-6).sqrt().mean(), 0),
        (lambda out: (out - torch.linspace(0, 1, 9)).square().mean(), 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_that_broadcasting_compares_with_all_targets_are_counted(loss_of, num_paired):
    loss = loss_of(nn.Linear(3, 1)(torch.randn(6, 3)))
    loss.backward()
    assert loss_graph(loss.grad_fn).num_paired == num_paired


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_what_cannot_be_seen_is_unknown():
    x = torch.randn(3, requires_grad=True)
    assert loss_graph(Opaque.apply(x).grad_fn).has_softmax is None
    assert loss_graph(None).has_softmax is None
    total = x.sum()
    for _ in range(400):
        total = total + 1
    assert loss_graph(total.grad_fn).has_softmax is None


def test_a_waveform_whose_mean_is_subtracted_has_no_log_z(tmp_path):
    model, target = nn.Linear(4, 16), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        for _ in range(3):
            out = model(torch.randn(8, 4))
            loss = ((out - out.mean(1, keepdim=True)) - (target - target.mean(1, keepdim=True))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert "activation/log_z" not in forewarn.open_run(tmp_path / "run").names()
