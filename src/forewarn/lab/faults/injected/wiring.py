"""Faults in the training loop: what is called, what is connected, and which parameters the optimizer has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that hold a trainable matrix themselves, in the order of the model."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name
        and any(parameter.dim() >= 2 and parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def first_layers(model: nn.Module, share: float) -> list[nn.Module]:
    """At least one of the first layers, and never the last."""
    modules = [module for _, module in layers(model)]
    return modules[: max(1, min(len(modules) - 1, round(share * len(modules))))]


class NeverCalled(Change):
    """Replaces a method of every optimizer by one that does nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def watched(self, session: Session) -> None:
        for optimizer in session.optimizers:
            setattr(optimizer, self.name, nothing)
        if self.name == "zero_grad":
            for module in session.model.modules():
                module.zero_grad = nothing  # type: ignore[method-assign]


def nothing(*_: Any, **__: Any) -> None:
    """A call that was forgotten."""


class Frozen(Change):
    """Turns off `requires_grad` of the first layers, before the run or during it."""

    def __init__(self, share: float, onset: int | None) -> None:
        self.share, self.onset = share, onset or 0
        self._is_before = onset is None

    def model(self, model: nn.Module) -> None:
        if self._is_before:
            self._freeze(model)

    def completed(self, step: int, session: Session) -> None:
        if not self._is_before and step == self.onset - 1:
            self._freeze(session.model)

    def _freeze(self, model: nn.Module) -> None:
        for module in first_layers(model, self.share):
            module.requires_grad_(False)
            for parameter in module.parameters():
                parameter.grad = None


class LeftOut(Change):
    """Leaves the first layers out of the optimizers."""

    def __init__(self, share: float) -> None:
        self.share = share

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        gone = {id(parameter) for module in first_layers(model, self.share) for parameter in module.parameters()}
        for group in optimizer.param_groups:
            kept = [parameter for parameter in group["params"] if id(parameter) not in gone]
            group["params"] = kept or group["params"]


class Replaced(Change):
    """Replaces layers by new ones after the optimizer was made."""

    def __init__(self, share: float) -> None:
        self.share = share

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        if len(session.optimizers) > 1:
            return
        replaced = {id(module) for module in first_layers(model, self.share)}
        for name, module in list(model.named_modules()):
            if id(module) in replaced:
                parent = model.get_submodule(name.rpartition(".")[0])
                setattr(parent, name.rpartition(".")[2], copy.deepcopy(module))


class Detached(Change):
    """Cuts the graph after a layer: nothing before it learns."""

    def __init__(self, share: float) -> None:
        self.share = share

    def model(self, model: nn.Module) -> None:
        first_layers(model, self.share)[-1].register_forward_hook(_cut)


def _cut(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)
    return output.detach()


class OwnedTwice(Change):
    """Adds a second optimizer of the same kind, with the same parameters, that steps as well."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        other = torch.optim.SGD(parameters, lr=self.factor * optimizer.param_groups[0]["lr"], momentum=0.9)
        session.optimizers.append(other)
        optimizer.register_step_post_hook(lambda *_: other.step())


class LossChanged(Change):
    """Changes the loss from a step on."""

    def __init__(self, change: Callable[[Tensor], Tensor], onset: int = 0) -> None:
        self.change, self.onset = change, onset

    def loss(self, step: int, loss: Tensor) -> Tensor:
        return self.change(loss) if step >= self.onset else loss


@fault("no-zero-grad", causes="G109", words="zero_grad", fixes="call_zero_grad")
def no_zero_grad(draw: Draw) -> Change:
    """`zero_grad` is never called, so gradients add up."""
    return NeverCalled("zero_grad")


@fault("no-step", causes="U105 U101:optimizer_not_stepped", words=r"optimizer\.step", fixes="call_optimizer_step")
def no_step(draw: Draw) -> Change:
    """`optimizer.step` is never called."""
    return NeverCalled("step")


@fault("frozen-during-run", causes="U101:requires_grad_off", words="requires_grad", fixes="set_requires_grad",
       is_dynamic=True)  # fmt: skip
def frozen_during_run(draw: Draw) -> Change:
    """Layers stop training because `requires_grad` is turned off during the run."""
    return Frozen(draw.between(0.5, 1.0), draw.onset())


@fault("frozen-before-run", words="not trained|frozen before|requires_grad", fixes="set_requires_grad unfreeze",
       is_told_as_information=True)  # fmt: skip
def frozen_before_run(draw: Draw) -> Change:
    """Most layers are frozen before the run by mistake."""
    return Frozen(draw.between(0.7, 1.0), None)


@fault("not-in-optimizer", causes="U106 U101:not_in_optimizer", words="not in any optimizer", fixes="add_to_optimizer")
def not_in_optimizer(draw: Draw) -> Change:
    """The optimizer does not have the first layers."""
    return LeftOut(draw.between(0.4, 1.0))


@fault("stale-optimizer", causes="U106 U101:not_in_optimizer", words="not in any optimizer|another model",
       fixes="add_to_optimizer")  # fmt: skip
def stale_optimizer(draw: Draw) -> Change:
    """Layers were replaced after the optimizer was made, so it has the old ones."""
    return Replaced(draw.between(0.4, 1.0))


@fault("detached-graph", causes="G108 U101:no_gradient", words="detach", fixes="check_graph")
def detached_graph(draw: Draw) -> Change:
    """A layer's output is detached, so that nothing before it learns."""
    return Detached(draw.between(0.3, 1.0))


@fault(
    "wrong-sign", words=r"\bsign\b|wrong direction|maximi[sz]|negative|below zero", fixes="check_objective check_sign"
)
def wrong_sign(draw: Draw) -> Change:
    """The loss is maximized."""
    return LossChanged(torch.neg)


@fault("log-of-zero", causes="L101", words=r"\blog\b", fixes="find_operation skip_batch", is_dynamic=True,
       is_instant=True)  # fmt: skip
def log_of_zero(draw: Draw) -> Change:
    """The loss takes the logarithm of a probability that has become zero."""
    return LossChanged(lambda loss: loss - 0.01 * torch.log(0.0 * loss), draw.onset())


@fault(
    "parameter-in-two-optimizers", words="(two|several|both|more than one) optimizers?", fixes="remove_from_optimizer"
)
def parameter_in_two_optimizers(draw: Draw) -> Change:
    """A second optimizer has the same parameters and moves them too."""
    return OwnedTwice(draw.magnitude(3, 30))


@fault("accumulation-without-division", words="micro-batch|divid", fixes="divide_loss lower_lr",
       needs={Trait.ACCUMULATION})  # fmt: skip
def accumulation_without_division(draw: Draw) -> Change:
    """The losses of micro-batches are summed instead of averaged."""

    class Undivided(Change):
        def number(self, name: str, value: float) -> float:
            return 1.0 if name == "divisor" else value

    return Undivided()
