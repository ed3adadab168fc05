"""The gradient noise scale from the gradients of single ranks, in real processes, against norms taken by hand."""

import contextlib
import math
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import forewarn
from forewarn.config import Config
from forewarn.judge.diagnosis import replay
from forewarn.measure.noise_scale import NoiseScale
from forewarn.types import Reason
from tests.measure.test_noise_scale import DISTANCE, SIGMA, SIZE, Quadratic
from tests.processes import in_two_processes

NUM_RANKS = 2
STEPS = 12
IN_EXAMPLES = SIZE * SIGMA**2 / DISTANCE**2
"""The noise scale of the quadratic."""


class Model(nn.Module):
    """A tied weight, a sparse embedding if asked for, and a layer that rank 0 may leave out."""

    def __init__(self, sparse=False, optional=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 8, sparse=sparse)
        self.inner = nn.Linear(8, 8)
        self.optional = nn.Linear(8, 8) if optional else None
        self.last = nn.Linear(8, 1)

    def forward(self, tokens, leave_out=False):
        hidden = torch.tanh(self.inner(torch.tanh(self.inner(self.embedding(tokens)))))
        if self.optional is not None and not leave_out:
            hidden = self.optional(hidden)
        return self.last(hidden.mean(dim=1))


def batch(step, rank, number=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(0, 7, (4, 5), generator=generator), torch.randn(4, 1, generator=generator)


def norm_of(model):
    """Of all gradients together, by plain sums in float64; sparse ones as what they stand for."""
    gradients = [each.grad.to_dense() if each.grad.is_sparse else each.grad for each in model.parameters()]
    return math.sqrt(sum(each.double().square().sum().item() for each in gradients))


def own_norm(model, step, number, how):
    """The norm of rank 0's gradient on its own batch, computed by a copy outside DDP."""
    twin = Model(sparse=how == "sparse", optional=how == "unused")
    twin.load_state_dict(model.module.state_dict())
    tokens, target = batch(step, 0, number)
    (twin(tokens) - target).square().mean().backward()
    return norm_of(twin)


SETTINGS = {
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "unused": {"find_unused_parameters": True},
}

UNSEEN = ("hook", "unused", "local")
"""A compressed mean, a layer that rank 0 leaves out, and gradients that nobody averages."""


def train(rank, folder, how):
    weights = {}
    for watched in (True, False):
        torch.manual_seed(0)
        plain = Model(sparse=how == "sparse", optional=how == "unused")
        model = DistributedDataParallel(plain, **SETTINGS.get(how, {}))
        if how == "hook":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[]) if watched else None
        passes = 3 if how == "no_sync" else 1
        true_norms = []
        updates = mock.patch.object(NoiseScale, "update", autospec=True, side_effect=NoiseScale.update)
        update = updates.start()  # the readings of a step arrive once all ranks have sent theirs, up to a step later
        for step in range(STEPS):
            true = own_norm(model, step, 0, how) if watched and rank == 0 else math.nan
            for number in range(passes):
                alone = how == "local" or number < passes - 1
                with model.no_sync() if alone else contextlib.nullcontext():
                    tokens, target = batch(step, rank, number)
                    loss = (model(tokens, *([rank == 0] if how == "unused" else [])) - target).square().mean()
                    loss.backward()
            assert all(each._backward_hooks is None for each in model.parameters())
            true_norms.append((true, NUM_RANKS * norm_of(model)))
            if monitor is not None and how == "clip":
                monitor.clip_grad_norm_(1e3)
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step(loss)
        weights[watched] = [each.detach().clone() for each in model.parameters()]
        if monitor is not None:
            monitor.close()
        updates.stop()
        if monitor is not None and rank == 0:
            if how not in UNSEEN:
                calls = [call.args for call in update.call_args_list]
                assert {(call[1], call[4]) for call in calls} == {(passes * NUM_RANKS, NUM_RANKS)}
                for call, norms in zip(calls, true_norms, strict=True):
                    assert call[2:4] == pytest.approx(norms, rel=1e-5)
            assert monitor._loop.failures == {}
            assert not [alert for alert in monitor.alerts if alert.code == "X103"]
            assert ("gradient/noise_scale" in monitor.history) is (how not in UNSEEN)
            reason = monitor.history.series("monitor/unavailable", "gradient/noise_scale").last
            assert reason == Reason.RANK_GRADIENT_UNSEEN if how in UNSEEN else math.isnan(reason)
    assert all(map(torch.equal, weights[True], weights[False])), how


def in_turn(rank, folder, function, cases):
    """Starting processes takes longer than what they do here, so they do all of it."""
    for case in cases:
        function(rank, f"{folder}/{case}", case)


HOW = ("plain", "view", "clip", "static", "find_unused", "sparse", "no_sync", "hook", "unused", "local")


def test_the_norm_of_one_rank_is_that_of_its_own_batch_and_training_stays_bit_identical(tmp_path):
    in_two_processes(in_turn, str(tmp_path), train, HOW)


def train_quadratic(rank, folder, case):
    passes, size = case
    model = DistributedDataParallel(Quadratic(SIZE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = forewarn.Config(hyperparameters={"batch_size": NUM_RANKS * passes * size})
    monitor = forewarn.watch(model, optimizer, f"{folder}/run", every=1, views=[], config=settings)
    generator = torch.Generator().manual_seed(rank)
    center = torch.full((SIZE,), DISTANCE / math.sqrt(SIZE))
    for _ in range(400):
        for number in range(passes):
            with contextlib.nullcontext() if number == passes - 1 else model.no_sync():
                loss = model(center + SIGMA * torch.randn(size, SIZE, generator=generator))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    monitor.close()
    if rank == 0:
        in_passes = IN_EXAMPLES / (NUM_RANKS * size)
        assert monitor.history.series("gradient/noise_scale").last == pytest.approx(in_passes, rel=0.2)


def test_on_a_quadratic_with_gaussian_noise_it_is_the_closed_form_over_all_ranks(tmp_path):
    cases = [(1, 1), (1, 4), (3, 2)]
    in_two_processes(in_turn, str(tmp_path), train_quadratic, cases)
    for passes, size in cases:
        with forewarn.open_run(tmp_path / f"{(passes, size)}" / "run") as run:
            checklist = replay(run, Config.from_stored(run.config).rule_set()).checklist
            (check,) = [each for each in checklist if each.name == "batch size"]
        found = re.fullmatch(r"gradient noise scale (\S+) examples: .*; yours is (\d+)", check.detail)
        assert float(found[1]) == pytest.approx(IN_EXAMPLES, rel=0.25)
        assert int(found[2]) == NUM_RANKS * passes * size
