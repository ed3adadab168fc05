"""Looking inside the model: hooks exist only while steps are measured, and never get in the way."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn.measure.forward import hookable_modules
from forewarn.measure.probe import GradientTap, ModuleTap, Probe


class Onlooker(Probe):
    """Notes the modules that it sees pass by."""

    name = "onlooker"

    def __init__(self, model: nn.Module, raises: bool = False) -> None:
        self._modules = hookable_modules(model)
        self._raises = raises
        self.entered: list[str] = []
        self.left: list[str] = []
        self.outputs: list[object] = []

    def module_taps(self) -> list[ModuleTap]:
        return [self._place(name, module) for name, module in self._modules.items() if name]

    def forward_ended(self, output: object) -> None:
        self.outputs.append(output)

    def _place(self, name: str, module: nn.Module) -> ModuleTap:
        def entered(args: object, kwargs: object) -> None:
            self.entered.append(name)
            if self._raises:
                raise RuntimeError("no")

        return ModuleTap(module, entered, lambda args, kwargs, output: self.left.append(name))


def watched(
    model: nn.Module, run: Path, every: int = 2, raises: bool = False, until: int = 100
) -> tuple[forewarn.Monitor, Onlooker]:
    optimizer, config = torch.optim.SGD(model.parameters(), 0.1), forewarn.Config(escalation_steps=0)
    monitor = forewarn.watch(
        model, optimizer, run, every=lambda step: step % every == 0 and step < until, config=config, views=[]
    )
    onlooker = Onlooker(model, raises)
    monitor._loop.probes.append(onlooker)
    return monitor, onlooker


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules() if module is not model
    )


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_modules_are_seen_on_measured_steps_only(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run")
    for step in range(4):
        onlooker.entered.clear()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        monitor.step(loss)
        assert onlooker.entered == (["0", "1", "2"] if step % 2 == 0 else [])
        assert hooks_on(model) == 0
    monitor.close()


def test_a_model_that_is_a_single_layer_is_looked_at_as_well(tmp_path):
    model = nn.Linear(3, 2)
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    onlooker.module_taps = lambda: [onlooker._place("root", model)]
    model(input=torch.ones(2, 3)).sum().backward()
    monitor.step(1.0)
    assert onlooker.entered == onlooker.left == ["root"]
    assert [type(output) for output in onlooker.outputs] == [torch.Tensor]
    assert monitor._loop.failures == {}
    assert len(monitor.history.series("activation/mean", "Linear")) == 1
    monitor.close()


def test_evaluation_and_no_grad_passes_are_not_looked_at(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    with torch.no_grad():
        model(torch.ones(2, 3))
    model.eval()(torch.ones(2, 3))
    assert onlooker.entered == []
    monitor.close()


def test_after_a_forward_pass_that_raises_hooks_do_nothing(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    assert onlooker.outputs == [None]
    onlooker.entered.clear()
    model[0](torch.ones(2, 3))
    assert onlooker.entered == []
    monitor.close()
    assert hooks_on(model) == 0


def own_hooks(model: nn.Module) -> list[int]:
    hooks = ((*module._forward_hooks.values(), *module._forward_pre_hooks.values()) for module in model)
    return [id(hook) for of_module in hooks for hook in of_module]


def test_the_same_hooks_stay_until_a_step_is_not_measured(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1, until=3)
    stayed = []
    for _ in range(5):
        model(torch.ones(2, 3)).sum().backward()
        stayed.append(own_hooks(model))
        monitor.step(1.0)
    assert stayed[0] == stayed[1] == stayed[2]
    assert len(stayed[0]) >= 3
    assert len(set(stayed[0])) == len(stayed[0])
    assert stayed[3] == stayed[4] == []
    assert onlooker.entered == ["0", "1", "2"] * 3
    monitor.close()


def test_what_a_hook_of_the_user_returns_is_what_is_measured(tmp_path):
    model = net()
    monitor, _ = watched(model, tmp_path / "run", every=1)
    for step in range(3):
        if step == 1:
            model[1].register_forward_hook(lambda module, args, output: torch.full_like(output, 7.0))
        if step == 2:
            model[2]._forward_hooks.clear()
        model(torch.ones(2, 3)).sum().backward()
        monitor.step(1.0)
    assert monitor.history.series("activation/mean", "1").values[1:].tolist() == [7.0, 7.0]
    assert len(monitor.history.series("activation/mean", "2").finite()) == 3
    monitor.close()


def test_copies_of_a_model_with_hooks_are_not_looked_at(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    model(torch.ones(2, 3)).sum().backward()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    monitor.step(1.0)
    onlooker.entered.clear()
    for other in copies:
        other(torch.ones(2, 3)).sum().backward()
    assert onlooker.entered == []
    monitor.close()


def test_hooks_that_are_on_do_not_break_the_graph_of_a_model_that_is_compiled(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    model(torch.ones(2, 3)).sum().backward()
    monitor.step(1.0)
    assert own_hooks(model)
    onlooker.entered.clear()
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 3)).sum().backward()
    assert onlooker.entered == []
    assert monitor._loop.failures == {}
    monitor.close()


def test_a_module_that_was_taken_out_has_no_hooks(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", every=1, views=[])
    model(torch.ones(2, 3)).sum().backward()
    monitor.step(1.0)
    old = model[1]
    assert old._forward_hooks
    model[1] = nn.Tanh()
    model(torch.ones(2, 3)).sum().backward()
    assert not old._forward_hooks
    assert model[0]._forward_hooks
    monitor.close()


def test_a_probe_that_raises_in_a_hook_is_switched_off_and_told(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1, raises=True)
    model(torch.ones(2, 3)).sum().backward()
    monitor.step(1.0)
    assert onlooker.entered == ["0"], "the modules after it are not looked at any more"
    assert [alert.scope for alert in monitor.alerts if alert.name == "probe-failed"] == ["onlooker"]
    monitor.close()


def test_what_is_recomputed_for_a_gradient_within_the_forward_pass_is_not_seen_twice(tmp_path):
    class Energy(nn.Module):
        """Gives the gradient of its block, as models of forces do."""

        def __init__(self) -> None:
            super().__init__()
            self.block = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            energy = checkpoint(self.block, x, use_reentrant=False).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    model = Energy()
    monitor, onlooker = watched(model, tmp_path / "run")
    loss = model(torch.ones(2, 3, requires_grad=True)).square().sum()
    loss.backward()
    monitor.step(loss)
    monitor.close()
    assert onlooker.entered == ["block", "block.0", "block.1", "block.2"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_recomputes_is_not_seen_twice(tmp_path, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = net()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    model = Checkpointed()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert onlooker.entered == ["block", "block.0", "block.1", "block.2"]
    monitor.close()


def test_modules_inside_compiled_code_are_left_out():
    inside = nn.ModuleDict({"plain": net(), "compiled": torch.compile(net(), backend="eager"), "in_place": net()})
    inside["in_place"].compile(backend="eager")
    found = hookable_modules(inside)
    assert list(found) == ["", "plain", "plain.0", "plain.1", "plain.2", "compiled"]
    assert found["compiled"] is inside["compiled"]
    assert hookable_modules(torch.compile(net(), backend="eager")) == {}


def test_wrappers_do_not_show_in_names():
    assert list(hookable_modules(nn.DataParallel(net()))) == ["", "0", "1", "2"]


def test_passes_inside_a_transform_are_not_looked_at(tmp_path):
    model = net()
    monitor, onlooker = watched(model, tmp_path / "run", every=1)
    parameters = dict(model.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (row[None],)).square().mean()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.ones(5, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.trace")  # deprecated in newer versions of torch
        torch.jit.trace(model, torch.ones(2, 3))
    assert onlooker.entered == []
    model(torch.ones(2, 3)).sum().backward()
    monitor.step(1.0)
    assert onlooker.entered == ["0", "1", "2"]
    assert monitor._loop.failures == {}
    monitor.close()


def test_nothing_of_a_step_stays_alive(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = []
    with forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor:
        for _ in range(6):
            output = model(torch.ones(2, 3))
            kept.append(weakref.ref(output))
            loss = output.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert [at for at, each in enumerate(kept) if each() is not None] == [5]


class Follower(Probe):
    """Follows every output of the first layer into the backward pass."""

    name = "follower"

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.gradients: list[object] = []

    def module_taps(self) -> list[ModuleTap]:
        return [ModuleTap(self._layer, left=self._left)]

    def _left(self, args: object, kwargs: object, output: tuple[torch.Tensor, ...]) -> list[GradientTap]:
        return [GradientTap(tensor, self.gradients.append) for tensor in output]


class Halves(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = super().forward(x).chunk(2, -1)
        return first, second


def test_an_output_that_the_loss_does_not_use_has_no_gradient_to_pass_on(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = Halves(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.halves(x)[1].square().mean()

    model = Net()
    monitor, _ = watched(model, tmp_path / "run")
    follower = Follower(model.halves)
    monitor._loop.probes.append(follower)
    model(torch.ones(2, 3)).backward()
    monitor.close()
    assert [type(gradient) for gradient in follower.gradients] == [torch.Tensor]
