"""Finds the passes of a loop that does not call the watched module itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.hooks import Hooks
from forewarn.measure.module_hooks import is_first_forward, is_transformed
from forewarn.measure.module_tree import Tree, models_in, unwrapped
from forewarn.measure.pipelining import is_rehearsal

_SEARCH_STEPS = 3
"""Number of steps that a search lasts: the phases of a loop may alternate."""

_MAX_SEARCHES = 8
"""Maximum number of searches in a run: some gradients come from no backward pass at all."""


class PassFinder:
    """Hooks on the modules that the loop calls, and on parameters whose gradients come from nowhere else.

    Usually the loop calls the watched module, and its output shows the backward pass. But Lightning's `training_step`
    may call `self.net`, a method such as `model.compute_loss` any part of the model, and a GAN in one module its
    halves. If an optimizer uses gradients that no seen pass explains, a search begins. For a few steps, every module
    has a hook, and one that is called outside all others becomes an entry point. Meanwhile parameters have hooks too.
    They stay if they saw a pass that no entry point shows, as with `torch.func.functional_call` or compiled code.
    """

    def __init__(
        self,
        model: nn.Module,
        tree: Tree,
        optimizers: Sequence[Optimizer],
        *,
        begins: Callable[..., None],
        ended: Callable[..., None],
        reached: Callable[[Tensor], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        """`begins` and `ended` take the forward hooks of entry points.

        `reached` takes the gradient of a parameter and returns whether it was the first sign of its backward pass.
        """
        self._tree = tree
        self._optimizers = optimizers
        self._models = models_in(model)
        self._begins, self._ended, self._reached, self._failed = begins, ended, reached, failed
        self._entries = Hooks(failed, traced=True)
        self._own: dict[int, nn.Module] = {}
        """By the id of an entry point: the user's own module in it, whose mode counts."""
        self._candidates = Hooks(failed, traced=True)
        self._parameters = Hooks(failed, traced=True)
        self._explained: dict[int, weakref.ref[Tensor]] = {}
        """Per optimizer: one of the gradients that the last backward pass left for it."""
        self._steps_left = self._searches = 0
        self._needs_parameters = False
        """Whether a hook on a parameter was the first sign of a backward pass."""
        self.inside: nn.Module | None = None
        """The entry point that runs now."""

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put hooks on the watched models. One without a `forward` can only be called in parts: the search begins."""
        for module in self._models:
            self._enter(module)
        if any(type(own).forward is nn.Module.forward for own in self._own.values()):
            self.search(parameters)

    def is_training(self, module: nn.Module) -> bool:
        """Whether a pass through this entry point is measured: a wrapper such as DDP may keep another mode."""
        is_real = torch.is_grad_enabled() and not is_transformed() and not is_rehearsal()
        return self._own[id(module)].training and is_real

    def is_acting(self, module: nn.Module) -> bool:
        """Whether a pass in training mode has no gradients, as when a policy acts."""
        is_real = not torch.is_grad_enabled() and not is_transformed() and not is_rehearsal()
        return self._own[id(module)].training and is_real

    def remove(self) -> None:
        for hooks in (self._entries, self._candidates, self._parameters):
            hooks.remove()

    def step_ended(self) -> None:
        self.inside = None  # an interrupted pass never left
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._candidates.remove()
                if not self._needs_parameters:
                    self._parameters.remove()

    def backward_ended(self) -> None:
        """Keep which gradients the pass left, without keeping them alive."""
        for index, optimizer in enumerate(self._optimizers):
            if (gradient := _first_gradient(optimizer)) is not None:
                self._explained[index] = weakref.ref(gradient)

    def explains(self, index: int) -> bool:
        """Whether the gradients that optimizer number `index` uses now come from a backward pass that was seen.

        If there are several optimizers, a pass may have been for another, so it must have left these very gradients. A
        loop may also replace gradients on purpose: once the searches are over, any pass will do.
        """
        reference = self._explained.pop(index, None)
        is_certain = len(self._optimizers) == 1 or self._searches == _MAX_SEARCHES
        if reference is not None and is_certain:
            return True
        gradient = _first_gradient(self._optimizers[index])
        return gradient is None or (reference is not None and reference() is gradient)

    def search(self, parameters: Sequence[nn.Parameter]) -> None:
        """Look for the passes that fill the gradients of these parameters."""
        if self._steps_left or self._searches == _MAX_SEARCHES:
            return
        self._searches += 1
        self._steps_left = _SEARCH_STEPS + 1  # the current step is nearly over
        for module in self._tree.hookable.values():
            if id(module) not in self._own:
                self._put(self._candidates, module, "register_forward_pre_hook", self._called, with_kwargs=True)
        hooked = {id(hook.owner) for hook in self._parameters}
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in hooked:
                self._put(self._parameters, parameter, "register_hook", self._parameter_reached)

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module was called: it is an entry point if no other is running."""
        is_training = module.training and torch.is_grad_enabled() and is_first_forward()
        if self.inside is None and is_training and id(module) not in self._own:
            self._enter(module)
            self._begins(module, args, kwargs)

    def _enter(self, module: nn.Module) -> None:
        self._own[id(module)] = unwrapped(module)
        self._put(self._entries, module, "register_forward_pre_hook", self._begins, with_kwargs=True)
        self._put(self._entries, module, "register_forward_hook", self._ended, always_call=True)

    def _parameter_reached(self, gradient: Tensor) -> None:
        if self._reached(gradient):
            self._needs_parameters = True

    def _put(self, hooks: Hooks, owner: Any, register: str, target: Callable[..., object], **settings: bool) -> None:
        try:
            hooks.put(owner, register, target, **settings)
        except Exception as error:  # one that refuses must not cost the others
            self._failed(error)


def _first_gradient(optimizer: Optimizer) -> Tensor | None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad  # type: ignore[no-any-return]
    return None
