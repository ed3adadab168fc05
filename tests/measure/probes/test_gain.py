"""The gain of blocks, against gradients taken by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import forewarn
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.lab.networks import MLP
from forewarn.measure.parameters import block_names


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, *, hidden: Tensor, note: str) -> tuple[Tensor, str]:
        return hidden + torch.tanh(self.inner(hidden)), note


class Stack(nn.Module):
    """Blocks that take keywords, give tuples, and have something between them."""

    def __init__(self, depth: int = 3, between: float = 1.0) -> None:
        super().__init__()
        self.start = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.between = between
        self.boundaries: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x)
        self.boundaries = []
        for block in self.blocks:
            taken = hidden if self.between == 1 else hidden * self.between
            hidden, _ = block(hidden=taken, note="n")
            self.boundaries.append((taken, hidden))
        return hidden.square().mean()


def gains_by_hand(model: Stack, batches: list[Tensor]) -> np.ndarray:
    squares = np.zeros((2, len(model.blocks)))
    for batch in batches:
        loss = model(batch)
        for at, (taken, given) in enumerate(model.boundaries):
            into, out = torch.autograd.grad(loss, [taken, given], retain_graph=True)
            squares[0, at] += into.double().square().sum().item()
            squares[1, at] += out.double().square().sum().item()
    return np.sqrt(squares[0] / squares[1])


def measured(model: nn.Module, batches: list[Tensor], run: Path, **measure: object) -> forewarn.Run:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with forewarn.watch(
        model, optimizer, run, config=forewarn.Config(measure=forewarn.Measure(**measure)), views=[]
    ) as monitor:
        for batch in batches:
            model(batch).backward()
        optimizer.step()
        monitor.step(1.0)
    return forewarn.open_run(run)


@pytest.mark.parametrize("between", [1.0, 0.5])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gains_are_those_of_autograd(tmp_path, between, micro_batches):
    torch.manual_seed(0)
    model = Stack(between=between)
    batches = [torch.randn(5, 4) for _ in range(micro_batches)]
    expected = gains_by_hand(model, batches)
    run = measured(model, batches, tmp_path / "run")
    found = [run.series("gain/block", f"blocks.{at}").values[0] for at in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(run.series("gain/mean").values, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(run.series("gain/amplification").values, expected.prod(), rtol=1e-5)


def test_block_norms_are_those_of_the_parameters_inside(tmp_path):
    model = Stack()
    run = measured(model, [torch.randn(5, 4)], tmp_path / "run")
    for at, block in enumerate(model.blocks):
        norm = torch.cat([each.grad.flatten() for each in block.parameters()]).norm()
        np.testing.assert_allclose(run.series("gradient/block_norm", f"blocks.{at}").values, norm, rtol=1e-5)


def test_a_pass_that_reaches_only_the_last_blocks_is_not_mixed_with_a_whole_one(tmp_path):
    """As a gradient penalty does, or the balance of tasks: autograd.grad on a part of the graph."""
    model, batch = Stack(), torch.randn(5, 4)
    expected = gains_by_hand(model, [batch])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        loss = model(batch)
        torch.autograd.grad(loss * 100, model.boundaries[-1][1], retain_graph=True)
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    found = forewarn.open_run(tmp_path / "run")
    np.testing.assert_allclose(found.series("gain/block", "blocks.2").values, expected[2:], rtol=1e-5)


def test_a_model_whose_first_layer_takes_the_data_has_no_gain_there(tmp_path):
    model = nn.Sequential(MLP([4, 8, 8, 1]), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        monitor.step(1.0)
    run = forewarn.open_run(tmp_path / "run")
    assert np.isnan(run.series("gain/block", "0.layers.0").values[0])
    assert np.isfinite(run.series("gain/block", "0.layers.2").values[0])


def test_drift_is_against_the_oldest_check_of_the_window_and_goes_on_after_a_resume(tmp_path):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    batch = torch.randn(5, 4)
    state = {}
    for part in range(2):
        config = forewarn.Config(measure=forewarn.Measure(mean_gain_drift_window=3))
        with forewarn.watch(model, optimizer, tmp_path / f"{part}", config=config, views=[]) as monitor:
            if part:
                monitor.load_state_dict(state)
            for _ in range(4):
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step(1.0)
            state = monitor.state_dict()
    runs = [forewarn.open_run(tmp_path / f"{part}") for part in range(2)]
    means = np.concatenate([run.series("gain/mean").values for run in runs])
    drift = np.concatenate([run.series("gain/drift").values for run in runs])
    expected = [means[at] / means[max(0, at - 2)] - 1 for at in range(1, 8)]
    np.testing.assert_allclose(drift, expected, atol=1e-6)
    averages = runs[1].series("gain/mean_ma").values
    np.testing.assert_allclose(averages, [means[at - 2 : at + 1].mean() for at in range(4, 8)], rtol=1e-6)


def test_compiled_blocks_are_unavailable_and_said_once(tmp_path):
    model = torch.compile(Stack(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        for _ in range(3):
            model(torch.randn(5, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(1.0)
    run = forewarn.open_run(tmp_path / "run")
    assert "gain/block" not in run.names()
    assert len(run.series("monitor/unavailable", "gain/block").values) == 1
    assert [alert.scope for alert in monitor.alerts if alert.name == "unavailable"].count("gain/block") == 1


def test_nothing_is_held_after_the_step(tmp_path):
    """A hook that held its own tensor would keep every activation of the pass alive."""
    import gc
    import weakref

    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    gc.disable()
    try:
        with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
            loss = model(torch.randn(5, 4))
            kept = weakref.ref(model.boundaries[1][0])
            model.boundaries = []
            loss.backward()
            del loss
            assert kept() is None
            optimizer.step()
            monitor.step(1.0)
    finally:
        gc.enable()


def test_blocks_are_found_or_named(tmp_path):
    gpt = GPT(GPTConfig(context=8, depth=3, heads=1, width=8))
    assert block_names(gpt) == ("blocks.0", "blocks.1", "blocks.2")
    assert block_names(gpt, r"blocks\.\d+\.attention") == tuple(f"blocks.{at}.attention" for at in range(3))
    assert block_names(MLP([4, 8, 8, 1])) == tuple(f"layers.{at}" for at in range(5))
    assert block_names(nn.Linear(3, 3)) == ()
    with pytest.raises(ValueError, match="matches no module"):
        forewarn.watch(
            gpt,
            torch.optim.SGD(gpt.parameters(), 0.1),
            tmp_path / "run",
            config=forewarn.Config(measure=forewarn.Measure(blocks="x")),
        )


class Heads(nn.Module):
    """Blocks that all read the same tensor, as the capsules of a layer do."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x)
        return torch.stack([block(hidden) for block in self.blocks]).square().mean()


def test_blocks_side_by_side_have_no_gain(tmp_path):
    run = measured(Heads(), [torch.randn(5, 4)], tmp_path / "run")
    assert not {name for name in run.names() if name.startswith("gain/") or name == "gradient/block_norm"}
