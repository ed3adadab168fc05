"""Finds what a script trains, and watches it: its models, optimizers and loss, and where each step ends.

The script is not changed. From the import of torch on, new optimizers, backward passes and optimizer steps are noticed.
Calls of modules are noticed only while an optimizer is new: from its creation until its model is first called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forewarn.integrations.script import LINES_TO_ADD, Ending, StartAndAlerts
from forewarn.measure.module_tree import named_modules

if TYPE_CHECKING:
    from forewarn.monitor import Monitor

_log = logging.getLogger("forewarn")

PATIENCE = 20
"""Steps of one optimizer after which the others no longer count as part of the same step.

A critic often takes 5 steps for each step of the generator; an optimizer that was only created takes none at all.
"""
LEAST_STEPS = 10
"""Steps that make a run: fewer, again and again, are the inner loops of something larger."""
MOST_SHORT_RUNS = 5
"""Number of runs in a row with fewer steps after which it is given up to tell what one run is."""


class Discovery:
    """Watches everything that is trained in this process, one run after the other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        """The arguments of `forewarn.watch`."""
        self.is_beginning = False
        """Whether a monitor is being made here."""
        self.any_steps = False
        """Whether any step was watched."""
        self.any_backward = False
        """Whether any gradient was computed."""
        self._is_off = False
        self._training: Training | None = None
        self._ending = Ending()
        self._short_runs = self._num_discarded = 0
        self._fresh: list[weakref.ref[Optimizer]] = []
        """Optimizers that are not watched yet."""
        self._earlier: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped in some run."""
        self._left_alone: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that another monitor watches."""
        self._loose: list[str] = []
        """The classes of optimizers whose tensors belong to no module."""
        self._calls: set[int] = set()
        """The ids of the modules that were called since an optimizer was new."""
        self._fresh_modules: set[int] | None = None
        """The ids of the modules around the parameters of new optimizers; None if they must be searched."""
        self._ignore_calls: Callable[[], None] | None = None
        """Stops noticing calls, if they are noticed."""
        self._evaluations = 0
        """How often the closure of the current optimizer step was called; 0 outside of it."""
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Notice from now on what torch does."""
        scaler = torch.amp.GradScaler
        self._observe(torch.autograd, "backward", before=self._backward_begins)
        self._notice(Optimizer, "__init__", self._optimizer_made)
        self._observe(Optimizer, "zero_grad", before=self._gradients_dropped)
        self._observe(scaler, "scale", after=_note_unscaled)
        self._observe(scaler, "step", before=self._scaler_steps, after=self._scaler_stepped)
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._undo += [handle.remove for handle in handles]
        os.register_at_fork(after_in_child=self._switch_off)  # a worker's models are not the ones that are trained

    def uninstall(self) -> None:
        """Leave torch as it was."""
        self._switch_off()
        self._stop_noticing_calls()
        while self._undo:
            self._undo.pop()()

    def finish(self, reason: str) -> Ending:
        """Close the last run; what was recorded, and what could not be."""
        self.uninstall()
        self._close(reason)
        if self._loose and not self.any_steps:
            self._ending.remarks.append(
                f"the tensors that {self._loose[0]} updates belong to no nn.Module; make them parameters of one, and "
                f"add these lines to the script:\n{LINES_TO_ADD}"
            )
        return self._ending

    def leave_alone(self, optimizers: Iterable[Optimizer], everything: bool) -> None:
        """Another monitor watches these optimizers; with `everything`, nothing else is watched here either."""
        self._left_alone.update(optimizers)
        if everything:
            self.uninstall()
        training = self._training
        if training is not None and (everything or any(own in self._left_alone for own in training.optimizers)):
            self._close("left to another monitor")

    def _switch_off(self) -> None:
        self._is_off = True

    def _observe(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        """Call `before` with the arguments of a function, and `after` with its result and its arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            if before is not None:
                self._guard(before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._guard(after, result, *args, **kwargs)
            return result

        setattr(owner, name, observed)
        self._undo.append(lambda: setattr(owner, name, original))

    def _notice(self, owner: type, name: str, noticed: Callable[[Any], None]) -> None:
        """Call `noticed` with each object on which this method is about to be called, without a frame in the call."""
        original = getattr(owner, name)

        def guarded(instance: Any) -> None:
            if not self._is_off and not torch.compiler.is_compiling():
                self._guard(noticed, instance)

        setattr(owner, name, _NoticedMethod(original, guarded))
        self._undo.append(lambda: setattr(owner, name, original))

    def _guard(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep a failure of ours away from the script, which then goes on unwatched."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            _log.debug("what the script trains cannot be watched", exc_info=True)
            self._give_up(f"this training cannot be watched from outside ({type(error).__name__}: {error})")
            return None

    def _give_up(self, why: str) -> None:
        self._ending.remarks.append(f"{why}; add these lines to the script instead:\n{LINES_TO_ADD}")
        self.uninstall()
        self._close("given up")

    # what torch does

    def _optimizer_made(self, optimizer: Optimizer) -> None:
        self._fresh.append(weakref.ref(optimizer))
        self._fresh_modules = None
        if self._ignore_calls is None:
            self._notice(nn.Module, "__call__", self._called)
            self._ignore_calls = self._undo.pop()

    def _called(self, module: nn.Module) -> None:
        """A module is about to be called, while an optimizer is new: the last moment to see its first forward pass."""
        self._calls.add(id(module))
        if not (module.training and torch.is_grad_enabled() and self._fresh):
            return
        if self._fresh_modules is not None and id(module) not in self._fresh_modules:
            return
        family = Family()
        alive = [optimizer for reference in self._fresh if (optimizer := reference()) is not None]
        fresh = [optimizer for optimizer in alive if optimizer not in self._left_alone]
        self._fresh_modules = {id(inner) for top in family.tops(fresh) for _, inner in named_modules(top)}
        if id(module) in self._fresh_modules:
            self._plan(fresh, family)

    def _backward_begins(self, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a checkpoint that runs its part again
            return
        self.any_backward = True
        if self._training is not None and self._evaluations <= 1:
            self._training.losses.add(tensors, grad_tensors)

    def _gradients_dropped(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """A loss whose gradients are thrown away, as in an attack on the inputs, is not the loss of the step."""
        training = self._training
        if training is not None and training.optimizers == [optimizer] and self._evaluations <= 1:
            training.losses.drop()

    def _scaler_steps(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.awaits = optimizer

    def _scaler_stepped(self, result: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        training = self._training
        if training is not None and training.awaits is optimizer and optimizer in training.optimizers:
            self._stepped(training, optimizer)  # the scaler has skipped the step

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._is_off or torch.compiler.is_compiling() or optimizer in self._left_alone or _is_inside_a_step():
            return None
        self._evaluations = 0
        return self._guard(self._counted, args, kwargs)

    def _counted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of an optimizer step, with a closure that counts its calls: the loss is that of the first."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def evaluated() -> Any:
            self._evaluations += 1
            return closure()

        if "closure" in kwargs:
            return args, kwargs | {"closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_off or torch.compiler.is_compiling() or optimizer in self._left_alone or _is_inside_a_step():
            return
        self._evaluations = 0
        if self._training is None or optimizer not in self._training.optimizers:
            self._guard(self._plan, [optimizer])  # it could not be foreseen: it is watched from its next step on
        else:
            self._guard(self._stepped, self._training, optimizer)

    def _stepped(self, training: Training, optimizer: Optimizer) -> None:
        training.awaits = None
        if not training.is_settled and self._begins_anew(training):
            return
        self._earlier.add(optimizer)
        index = training.optimizers.index(optimizer)
        training.losses.stepped(index)
        if training.rounds.stepped(index):
            training.monitor.step(training.losses.take())
            self.any_steps = True

    def _stop_noticing_calls_unless_needed(self) -> None:
        if self._training is not None and self._training.is_settled and not self._fresh:
            self._stop_noticing_calls()

    def _stop_noticing_calls(self) -> None:
        if self._ignore_calls is not None:
            self._ignore_calls()
            self._ignore_calls = None
            self._calls.clear()

    # what is watched

    def _begins_anew(self, training: Training) -> bool:
        """After the first step: if the models of some optimizers have not run, these are for later, and left out."""
        training.is_settled = True
        family = Family()
        idle = [own for own in training.optimizers if not self._calls & family.ids_around([own])]
        begins_anew = 0 < len(idle) < len(training.optimizers)
        if begins_anew:
            self._discard(training)
            self._fresh, self._fresh_modules = [weakref.ref(own) for own in idle], None
            self._begin([own for own in training.optimizers if own not in idle], family)
        self._stop_noticing_calls_unless_needed()
        return begins_anew

    def _plan(self, newcomers: Sequence[Optimizer], family: Family | None = None) -> None:
        """Watch these optimizers: in a run of their own, or as part of the present one."""
        family = family or Family()
        chosen: list[Optimizer] = []
        for optimizer in newcomers:
            if not family.tops([optimizer]):
                self._pass_over(optimizer)
            elif not _overlap(optimizer, chosen):
                chosen.append(optimizer)
        if not chosen:
            return
        returning = any(own in self._earlier for own in chosen)
        self._fresh = [ref for ref in self._fresh if (own := ref()) is not None and own not in newcomers]
        training = self._training
        if training is None:
            self._begin(chosen, family)
            return
        others = [own for own in training.optimizers if own not in chosen and (returning or not _overlap(own, chosen))]
        together = [*others, *chosen]
        models = family.models(together, self._calls)
        is_same = len(models) == len(training.models) and all(map(_is_in(training.models), models))
        if training.monitor.at <= 1 and not is_same and self._num_discarded < MOST_SHORT_RUNS:
            self._discard(training)
            self._begin(together, family)
        elif is_same:
            self._go_on(training, together, family)
        else:
            self._close()
            self._begin(together if returning else chosen, family)

    def _begin(self, optimizers: Sequence[Optimizer], family: Family) -> None:
        """Begin a run."""
        models = family.models(optimizers, self._calls)
        self._watch(models, optimizers, StartAndAlerts(self._settings.get("views")), family)

    def _pass_over(self, optimizer: Optimizer) -> None:
        """Leave an optimizer alone whose tensors belong to no module, such as the temperature of an agent."""
        self._left_alone.add(optimizer)
        self._loose.append(type(optimizer).__name__)

    def _go_on(self, training: Training, optimizers: Sequence[Optimizer], family: Family) -> None:
        """Go on with the same run and models, and other optimizers."""
        if not self._is_settling_down(training):
            return
        state, path = training.monitor.state_dict(), training.monitor.path  # of the same models, so it fits
        training.monitor.close("continued")
        self._watch(training.models, optimizers, training.views, family, run=path, resume=path is not None)
        if self._training is not None and self._training is not training:
            self._training.monitor.load_state_dict(state)
            self._training.began = self._training.monitor.at

    def _watch(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        views: StartAndAlerts,
        family: Family,
        **more: Any,
    ) -> None:
        from forewarn.attach import watch

        self.is_beginning = True
        try:
            monitor = watch(
                models[0] if len(models) == 1 else named(models),
                list(optimizers),
                **{**self._settings, "views": [views], "scaler": family.scaler, **more},
            )
        finally:
            self.is_beginning = False
        self._training = Training(monitor, list(models), list(optimizers), views)
        self._stop_noticing_calls_unless_needed()

    def _is_settling_down(self, training: Training) -> bool:
        """Whether runs have a length; False, after giving up, if optimizers are new again and again."""
        self._short_runs = self._short_runs + 1 if training.monitor.at - training.began < LEAST_STEPS else 0
        if self._short_runs < MOST_SHORT_RUNS:
            return True
        self._give_up("the script makes new optimizers every few steps, so it cannot be told what one run is")
        return False

    def _discard(self, training: Training) -> None:
        """Delete a run that had hardly begun, because more or less is to be watched in it."""
        from forewarn.store.deletion import delete_run

        path = training.monitor.path
        self._num_discarded += 1
        training.monitor.close("discarded")
        self._training = None
        if path is not None:
            delete_run(path)
            with contextlib.suppress(OSError):  # it may hold other files
                path.rmdir()

    def _close(self, reason: str = "completed") -> None:
        """End the present run, if there is one."""
        training, self._training = self._training, None
        if training is None:
            return
        if training.monitor.at == 0:
            self._discard(training)
            return
        training.monitor.close(reason)
        if training.monitor.path is not None:
            self._ending.runs.append(training.monitor.path)
        self._is_settling_down(training)


class Training:
    """One run: the optimizers that step together, and the models that they update."""

    def __init__(
        self, monitor: Monitor, models: list[nn.Module], optimizers: list[Optimizer], views: StartAndAlerts
    ) -> None:
        self.monitor, self.models, self.optimizers, self.views = monitor, models, optimizers, views
        self.rounds = Rounds(len(optimizers))
        self.losses = Losses(len(optimizers))
        self.is_settled = len(optimizers) == 1
        """Whether it is known that all optimizers take part."""
        self.awaits: Optimizer | None = None
        """The optimizer that a gradient scaler is about to step."""
        self.began = monitor.at
        """The first step with these optimizers."""


class Rounds:
    """Tells when a step of the run is complete: when every optimizer that takes part has stepped."""

    def __init__(self, num_optimizers: int) -> None:
        self._counts = [0] * num_optimizers
        self._partners = set(range(num_optimizers))

    def stepped(self, index: int) -> bool:
        """Count a step of one optimizer; True if it completes the step of the run."""
        self._counts[index] += 1
        self._partners.add(index)
        if self._counts[index] > PATIENCE:
            self._partners = {partner for partner in self._partners if self._counts[partner]}
        is_complete = all(self._counts[partner] for partner in self._partners)
        if is_complete:
            self._counts = [0] * len(self._counts)
        return is_complete


class Losses:
    """The loss of a step, from the tensors on which `backward` was called.

    Between two optimizer steps they are added up: a script that accumulates gradients divides each by their number. If
    an optimizer steps several times, its losses are averaged; those of several optimizers are added.
    """

    def __init__(self, num_optimizers: int) -> None:
        self._pending: Tensor | None = None
        self._by_optimizer: list[list[Tensor]] = [[] for _ in range(num_optimizers)]

    def add(self, tensors: Any, weights: Any) -> None:
        """Add what a backward pass begins with; with `weights`, the gradients that it is given."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        weights = [weights] * len(tensors) if weights is None or isinstance(weights, Tensor) else list(weights)
        with torch.no_grad():
            for tensor, weight in zip(tensors, weights, strict=False):
                if isinstance(tensor, Tensor) and not tensor.is_complex():
                    value = getattr(tensor, _UNSCALED, tensor).detach()
                    value = (value if weight is None else value * weight).sum(dtype=torch.float32)
                    self._pending = value if self._pending is None else self._pending + value

    def drop(self) -> None:
        """Forget the losses since the last optimizer step."""
        self._pending = None

    def stepped(self, index: int) -> None:
        """The losses so far led to a step of this optimizer."""
        if self._pending is not None:
            self._by_optimizer[index].append(self._pending)
            self._pending = None

    def take(self) -> Tensor | None:
        """The loss of the step that is complete; None if no backward pass was seen."""
        means = [torch.stack(losses).mean() for losses in self._by_optimizer if losses]
        for losses in self._by_optimizer:
            losses.clear()
        return torch.stack(means).sum() if means else None


_UNSCALED = "_forewarn_unscaled"
"""Attribute of a scaled loss: the loss before it was scaled."""


def _note_unscaled(scaled: Any, scaler: Any, outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        scaled, outputs = [scaled], [outputs]
    for one, before in zip(scaled, outputs, strict=False):
        if isinstance(one, Tensor) and one is not before:
            setattr(one, _UNSCALED, before.detach())


class Family:
    """Which module contains which, among all modules of the process at this moment."""

    def __init__(self) -> None:
        modules: list[nn.Module] = []
        scalers: list[Any] = []
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, nn.Module) and not kind.__module__.startswith("forewarn.measure."):  # not our own
                modules.append(thing)
            elif issubclass(kind, torch.amp.GradScaler) and thing.is_enabled():
                scalers.append(thing)
        if len(scalers) > 1:  # those of earlier trainings have scaled already
            scalers = [own for own in scalers if own._scale is None]
        self.scaler = scalers[0] if len(scalers) == 1 else None
        """The gradient scaler of what begins now; None if it cannot be told, and then it is found at a step."""
        self._owners: dict[int, list[nn.Module]] = {}
        """By the id of a parameter, the modules that hold it."""
        self._parents: dict[int, list[nn.Module]] = {}
        """By the id of a module, the modules that contain it."""
        for module in modules:
            for parameter in _held(module, "_parameters"):
                self._owners.setdefault(id(parameter), []).append(module)
            for child in _held(module, "_modules"):
                self._parents.setdefault(id(child), []).append(module)

    def tops(self, optimizers: Iterable[Optimizer]) -> list[nn.Module]:
        """The outermost modules around the parameters of these optimizers."""
        around = self._around(optimizers)
        return [module for module in around if id(module) not in self._parents]

    def ids_around(self, optimizers: Iterable[Optimizer]) -> set[int]:
        """The ids of the modules that contain a parameter of these optimizers, directly or further inside."""
        return {id(module) for module in self._around(optimizers)}

    def _around(self, optimizers: Iterable[Optimizer]) -> list[nn.Module]:
        around: dict[int, nn.Module] = {}
        waiting = [owner for parameter in _parameters(optimizers) for owner in self._owners.get(id(parameter), ())]
        while waiting:
            module = waiting.pop(0)
            if id(module) not in around:
                around[id(module)] = module
                waiting += self._parents.get(id(module), ())
        return list(around.values())

    def models(self, optimizers: Sequence[Optimizer], called: set[int]) -> list[nn.Module]:
        """The models that these optimizers train: outermost modules, none inside another.

        A module that several others contain is taken with the one that was called. A container that is not called
        itself is left for its parts if it has further ones that are not trained, such as target networks.
        """
        trained = {id(parameter) for parameter in _parameters(optimizers)}
        tops = self.tops(optimizers)
        tops.sort(key=lambda top: id(top) not in called)
        models: list[nn.Module] = []
        for top in tops:
            rest = trained - {id(parameter) for model in models for parameter in model.parameters()}
            models += _parts(top, rest, called)
        return models


def _parts(module: nn.Module, trained: set[int], called: set[int]) -> list[nn.Module]:
    """The module itself, or those of its children that are trained; none if it holds nothing that is trained."""
    if not any(id(parameter) in trained for parameter in module.parameters()):
        return []
    children = [child for child in _held(module, "_modules") if any(True for _ in child.parameters())]
    strangers = [child for child in children if _is_stranger(child, trained)]
    if id(module) in called or not strangers:
        return [module]
    return [part for child in children for part in _parts(child, trained, called)] or [module]


def _is_stranger(module: nn.Module, trained: set[int]) -> bool:
    """Whether a module could be trained, but no optimizer does it."""
    parameters = list(module.parameters())
    return any(own.requires_grad for own in parameters) and not any(id(own) in trained for own in parameters)


def _held(module: nn.Module, kind: str) -> Iterator[Any]:
    """The parameters or children of a module; also of one whose `__init__` has not run."""
    held = object.__getattribute__(module, "__dict__").get(kind) or {}
    return (value for value in list(held.values()) if value is not None)


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    return (parameter for own in optimizers for group in own.param_groups for parameter in group["params"])


def _overlap(optimizer: Optimizer, others: Sequence[Optimizer]) -> bool:
    """Whether an optimizer holds a parameter of one of the others."""
    return not {id(own) for own in _parameters([optimizer])}.isdisjoint(id(own) for own in _parameters(others))


def _is_in(models: Sequence[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda model: any(model is other for other in models)


def named(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The models under the names of the script's global variables, or else of their classes."""
    variables = {id(value): name for name, value in vars(sys.modules["__main__"]).items() if isinstance(name, str)}
    names: dict[str, nn.Module] = {}
    for model in models:
        name = variables.get(id(model)) or type(model).__name__
        while name in names:
            stem = name.rstrip("0123456789")
            name = f"{stem}{int(name[len(stem) :] or 1) + 1}"
        names[name] = model
    return names


class _NoticedMethod:
    """In place of a method: tells on which object it is about to be called, and returns the method itself."""

    def __init__(self, original: Any, noticed: Callable[[Any], None]) -> None:
        self._original, self._noticed = original, noticed

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self._original
        if not _is_compiling_wrapper(sys._getframe(1)):
            self._noticed(instance)
        return self._original.__get__(instance, owner)


def _is_compiling_wrapper(frame: FrameType) -> bool:
    """Whether `torch.compile` is wrapping the module, which looks the method up without calling it."""
    return frame.f_code.co_name == "_initialize" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


_STEP: CodeType = Optimizer.profile_hook_step(lambda: None).__code__
"""The code around every optimizer step that calls our hooks."""


def _is_inside_a_step() -> bool:
    """Whether one optimizer steps inside the step of another, which wraps it."""
    frame: FrameType | None = sys._getframe(1)
    depth = 0
    while frame is not None and depth < 2:
        depth += frame.f_code is _STEP
        frame = frame.f_back
    return depth > 1
