"""Checks of the parameters, of the optimizers that hold them and of the modules' modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from forewarn.measure.module_tree import clean_name, models_in, named_modules, named_parameters, unwrapped
from forewarn.preflight_checks.result import PreflightCheck, State
from forewarn.views.wording import short

MOST_NAMES = 3
"""Maximum number of parameters named in a line."""

_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def check_groups(root: nn.Module, optimizers: Sequence[Optimizer]) -> PreflightCheck:
    """Whether every trainable parameter is in exactly one optimizer group."""
    name = "parameters in optimizer"
    parameters = {clean_name(path): parameter for path, parameter in named_parameters(unwrapped(root))}
    trainable = {path: parameter for path, parameter in parameters.items() if parameter.requires_grad}
    held = Counter(
        id(parameter) for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
    )
    numbers = {"trainable": float(len(trainable)), "tensors": float(len(parameters))}
    if not trainable:
        return PreflightCheck(
            name, State.FAIL, f"none of the {len(parameters)} tensors has requires_grad=True",
            "Call model.requires_grad_(True), or that of the part to train", numbers,
        )  # fmt: skip
    missing = [path for path, parameter in trainable.items() if not held[id(parameter)]]
    if len(missing) == len(trainable):
        return PreflightCheck(
            name, State.FAIL, "the optimizer holds none of the model's trainable parameters",
            "Create the optimizer from model.parameters(), after the model is built and moved", numbers,
        )  # fmt: skip
    if missing:
        return PreflightCheck(
            name, State.LOOK, f"{_count(missing, trainable)} in no optimizer group: {named(missing)}",
            "Add them to a group of the optimizer, or freeze them with requires_grad_(False)",
            numbers | {"missing": float(len(missing))},
        )  # fmt: skip
    twice = [path for path, parameter in trainable.items() if held[id(parameter)] > 1]
    if twice:
        return PreflightCheck(
            name, State.LOOK, f"{_count(twice, trainable)} in two optimizer groups: {named(twice)}",
            "Keep each parameter in one group: two groups move it twice", numbers | {"twice": float(len(twice))},
        )  # fmt: skip
    sizes = [parameter.numel() for parameter in trainable.values() if not is_lazy(parameter)]
    subject = "the trainable tensor is" if len(trainable) == 1 else f"each of {len(trainable)} trainable tensors is"
    return PreflightCheck(name, State.PASS, f"{subject} in one group, {sum(sizes):,} values", "", numbers)


def frozen_note(root: nn.Module) -> PreflightCheck | None:
    """The parameters that are frozen, on purpose or by mistake; None if there are none."""
    parameters = {clean_name(path): parameter for path, parameter in named_parameters(unwrapped(root))}
    frozen = [path for path, parameter in parameters.items() if not parameter.requires_grad]
    if not frozen:
        return None
    sizes = {path: 0 if is_lazy(parameter) else parameter.numel() for path, parameter in parameters.items()}
    fraction = sum(sizes[path] for path in frozen) / max(sum(sizes.values()), 1)
    share = f"{100 * fraction:.0f}% of the values"
    return PreflightCheck(
        "frozen parameters", State.INFO, f"{_count(frozen, parameters)} frozen, {share}: {named(frozen)}", "",
        {"frozen": float(len(frozen)), "share": fraction},
    )  # fmt: skip


def check_mode(root: nn.Module) -> PreflightCheck:
    """Whether the model is in training mode, and what dropout and batch normalization do in it."""
    name = "training mode"
    modules = [(clean_name(path), module) for path, module in named_modules(unwrapped(root))]
    matters = [(path, module) for path, module in modules if isinstance(module, _DROPOUTS + _BATCH_NORMS)]
    rates = sorted({module.p for _, module in matters if isinstance(module, _DROPOUTS) and module.p})
    dropout = "dropout " + ", ".join(f"{rate:g}" for rate in rates[:MOST_NAMES]) if rates else "no dropout"
    if not all(model.training for model in models_in(unwrapped(root))):
        if matters:
            return PreflightCheck(
                name, State.LOOK, "the model is in evaluation mode: dropout is off, and batch norms do not update",
                "Call model.train() before training",
            )  # fmt: skip
        return PreflightCheck(name, State.PASS, "evaluation mode, which changes nothing in this model")
    resting = [path for path, module in matters if not module.training and _is_on(module)]
    if resting:
        return PreflightCheck(
            name, State.LOOK, f"{len(resting)} layers are in evaluation mode: {named(resting)}",
            "Call model.train() before training, unless they are frozen on purpose",
        )  # fmt: skip
    return PreflightCheck(name, State.PASS, f"on, {dropout}")


def _is_on(module: nn.Module) -> bool:
    """Whether training mode would change what a module does; a frozen batch norm is left alone on purpose."""
    if isinstance(module, _BATCH_NORMS):
        return any(parameter.requires_grad for parameter in module.parameters())
    return bool(getattr(module, "p", 0.0))


def named(paths: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(paths)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(map(short, listed[:MOST_NAMES])) + more


def _count(some: Sequence[str], total: Sequence[str] | dict[str, nn.Parameter]) -> str:
    return f"{len(some)} of {len(total)} tensors " + ("is" if len(some) == 1 else "are")
