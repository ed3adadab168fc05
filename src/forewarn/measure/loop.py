"""Watches a training loop through torch's hooks and passes its events on to the probes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.optim.optimizer as every_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.measure.attention_calls import STAND_IN
from forewarn.measure.availability import Availability
from forewarn.measure.dependencies import Dependencies
from forewarn.measure.engine import Value
from forewarn.measure.forward import ForwardPass, Reached, Taps, differentiable
from forewarn.measure.hooks import Hook, Hooks, end_own_pass, is_own_pass
from forewarn.measure.kept_batches import KeptBatches
from forewarn.measure.module_hooks import StandingHooks
from forewarn.measure.module_tree import Tree
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.pass_finder import PassFinder
from forewarn.measure.probe import Histograms, Pending, Probe, Reading
from forewarn.measure.recording import decoded
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import (
    BACKWARD_ENDED,
    EVALUATION_ENDED,
    FORWARD_ENDED,
    IN_BACKWARD,
    IN_EVALUATION,
    IN_FORWARD,
    IN_UPDATE,
    STEP_ENDED,
    UPDATE_ENDED,
    Stopwatch,
)
from forewarn.measure.transfer import on_host
from forewarn.types import Reason

_log = logging.getLogger("forewarn")

_MAX_WATCHED_OUTPUTS = 16
"""Maximum number of output tensors that get a hook to detect a backward pass."""
_STATES = {
    "step_begins": STEP_ENDED, "backward_begins": IN_BACKWARD, "backward_ended": BACKWARD_ENDED,
    "before_update": IN_UPDATE, "after_update": UPDATE_ENDED,
}  # fmt: skip
"""By event that every probe may hear: what the loop does from then on."""


class Loop:
    """Watches one model and its optimizers, and keeps probe failures away from the training."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        probes: Sequence[Probe],
        stopwatch: Stopwatch,
        parameter_index: ParameterIndex | None = None,
        *,
        attach: bool = True,
    ) -> None:
        """With `attach=False`, no hook is registered until `attach` is called."""
        self.step = Step()
        """The current step."""
        self.availability = Availability()
        self._dependencies = Dependencies(probes)
        self._parameter_index = parameter_index
        self.failures: dict[str, str] = {}
        """By name of the probe that raised, its error; these probes are switched off."""
        self.probes = list(self._dependencies.order)
        """The probes that are still switched on, each after those it depends on."""
        self._listeners: dict[tuple[str, bool], list[tuple[Probe, Callable[..., Any]]]] = {}
        """By event and whether the step is measured: the probes that handle it, until one is switched off, and how."""
        self._reached_hook = Hook(self._backward_reached, self.hook_failed, traced=True)
        self._ended_hook = Hook(self._backward_ended, self.hook_failed)
        self._settled_hook = Hook(self._gradients_settled, self.hook_failed)
        self._was_measured = False
        """Whether the step before was measured."""
        self.stopwatch = stopwatch
        self.model = model
        is_indexed = parameter_index is not None and parameter_index.called is model
        self.tree = parameter_index.tree if parameter_index is not None and is_indexed else Tree(model)
        """The modules that hooks can be put on."""
        self.module_hooks = StandingHooks(self.hook_failed)
        """The hooks of measured forward passes."""
        self.taps: Taps | None = None
        """What they call."""
        self.hooked: dict[str, nn.Module] = {}
        """What `Tree.hookable` was when they were put on."""
        self._hooks = Hooks(self.hook_failed, traced=True)
        """The hooks on the optimizers."""
        self._parameter_hooks = Hooks(self.hook_failed)
        """The hooks on parameters for this backward pass."""
        self.kept: KeptBatches | None = None
        """The batches of the last steps, if they are kept."""
        self.is_closed = False
        self._finder = PassFinder(
            model, self.tree, optimizers, begins=self._forward_begins, ended=self._forward_ended,
            reached=self._parameter_reached, failed=self.hook_failed,
        )  # fmt: skip
        self._refused: set[str] = set()
        """Metrics that are incomplete because a module refused hooks in the last measured pass."""
        self._refusing: set[str] = set()
        """Classes of modules that refuse hooks and have been named in the log."""
        self._graph_task = -1
        self.forward: ForwardPass | None = None
        self._optimizers = tuple(optimizers)
        if attach:
            self.attach()

    def attach(self) -> None:
        """Register the permanent hooks on the model and its optimizers; if one is refused, the others still work."""
        self._finder.attach(() if self._parameter_index is None else self._parameter_index.parameters)
        if self.kept is not None:
            self.kept.attach(self.hook_failed)
        for index, optimizer in enumerate(self._optimizers):
            for register, event in (
                ("register_step_pre_hook", "before_update"),
                ("register_step_post_hook", "after_update"),
            ):
                try:
                    self._hooks.put(optimizer, register, self._stepper(event, index))
                except Exception as error:
                    self.hook_failed(error)
        self._hooks.put(every_optimizer, "register_optimizer_step_pre_hook", self._any_steps)

    def attach_last(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call these around each optimizer step too, after what measures it; a closure is passed on."""

        def called(index: int) -> Callable[..., None]:
            def begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                before(index, optimizer, _closure(optimizer, args, kwargs))

            return begins

        for index, optimizer in enumerate(self._optimizers):
            self._hooks.put(optimizer, "register_step_pre_hook", called(index))
            self._hooks.put(optimizer, "register_step_post_hook", lambda *_: after())

    def search(self) -> None:
        """Look for the modules that the loop calls from its first step on, if it may not call the model itself."""
        if self._parameter_index is not None:
            self._finder.search(self._parameter_index.parameters)

    @property
    def measured(self) -> bool:
        """Whether the current step is measured in detail."""
        return self.step.measured

    @measured.setter
    def measured(self, measured: bool) -> None:
        self.step.measured = measured
        try:
            if measured:
                self._tell("step_begins")
            elif self.taps is not None:
                self.module_hooks.remove()
                self.taps = None
        except Exception as error:
            self.hook_failed(error)

    def close(self) -> None:
        """Remove every hook; tensors may keep some that do nothing. Safe to call again, as after an interrupt."""
        self.is_closed = True
        try:
            self._remove_hooks()
            self._end_forward(None)
        except Exception as error:
            self.hook_failed(error)
        finally:
            self._remove_hooks()  # those that an interrupt or a failure above left behind

    def _remove_hooks(self) -> None:
        for hooks in (self._hooks, self._finder, self.module_hooks, self._parameter_hooks):
            hooks.remove()
        STAND_IN.remove(*self._dependencies.order)
        if self.kept is not None:
            self.kept.remove()

    def collect(self, at_once: bool = False) -> tuple[Step, list[tuple[Probe, Pending]], list[Reading | Histograms]]:
        """The step that ends now, its readings ready for the transfer, and those that precede them and are known.

        With `at_once`, readings of a step without detail are decoded here as far as their values are on the host.
        """
        try:
            if is_own_pass():
                end_own_pass()
            if self.forward is not None:
                self._end_forward(None)  # an interrupted pass never ended
            if self._parameter_hooks:
                self._parameter_hooks.remove()  # nor did a backward pass that raised
            self._finder.step_ended()
        except Exception as error:
            self.hook_failed(error)
        step, self.step = self.step, Step(self.step.measured)
        was_measured, self._was_measured = self._was_measured, step.measured
        if step.measured or was_measured or not at_once:
            probes = (
                self.probes if step.measured or was_measured else [probe for probe, _ in self._listening("collect")]
            )
            return step, self.collect_from(probes, step), []
        collected: list[tuple[Probe, Pending]] = []
        readings: list[Reading | Histograms] = []
        for probe, collect in self._listeners.get(("collect", False)) or self._listening("collect"):
            try:
                pending = collect(step)
                if pending is None:
                    continue
                is_here = not collected
                for numbers in pending.tensors:
                    if type(numbers) is not float:
                        pending = _ready(pending)
                        is_here &= not any(isinstance(ready, Tensor) for ready in pending.tensors)
                        break
                if is_here:
                    readings += decoded(probe, pending, pending.tensors)
                else:
                    collected.append((probe, pending))
            except Exception as error:
                self.switch_off(probe, error)
        return step, collected, readings

    def collect_from(self, probes: Sequence[Probe], step: Step) -> list[tuple[Probe, Pending]]:
        """The readings of some probes, given in the order of their dependencies."""
        collected = []
        for probe in [probe for probe in probes if probe.name not in self.failures] if self.failures else probes:
            try:
                pending = probe.collect(step)
                if pending is not None:
                    collected.append((probe, _ready(pending)))
            except Exception as error:
                self.switch_off(probe, error)
        return collected

    def unavailable(self, step: Step) -> Iterator[Reading]:
        """What could not be measured on a step, once all its readings are decoded."""
        if self.failures:
            self.availability.regained = []  # it failed in this process
            for metric in self._dependencies.lost(step, self.probes):
                step.unavailable(metric, Reason.PROVIDER_FAILED)
        if self._refused and step.measured:
            step.reasons |= dict.fromkeys(self._refused, Reason.HOOKS_REFUSED)
        if step.reasons or self.availability.regained:
            yield from self.availability.news(step.reasons)

    def runs(self, probe: Probe) -> bool:
        """Whether a probe runs in this process: not on other ranks, and not after it has failed."""
        return any(other is probe for other in self.probes)

    def keep_only(self, is_kept: Callable[[Probe], bool]) -> None:
        """Go on without the probes that this rank has no use for."""
        self.probes = [probe for probe in self.probes if is_kept(probe)]
        self._listeners.clear()

    def guard(self, probe: Probe, call: Callable[..., Any], *args: Any) -> Any:
        """Call into a probe; an exception switches it off."""
        try:
            return call(*args)
        except Exception as error:
            self.switch_off(probe, error)
            return None

    def switch_off(self, probe: Probe, error: Exception) -> None:
        """Go on without a probe that raised."""
        self.report(f"probe {probe.name!r}", probe.name, error)
        self.probes = [other for other in self.probes if other is not probe]
        self._listeners.clear()

    def report(self, description: str, name: str, error: Exception) -> None:
        """Keep a failure for its alert, and log its traceback once."""
        if name not in self.failures:
            _log.error("the %s failed; training goes on without it", description, exc_info=error)
            self.failures[name] = f"{type(error).__name__}: {error}"

    def hook_failed(self, error: Exception) -> None:
        """The outer guard of every hook: report what no probe's guard has caught, and keep it away from torch."""
        with contextlib.suppress(Exception):  # if the user's logger raises too, nobody is left to tell
            self.report("hooks of the monitor", "hooks", error)

    def refused(self, module: nn.Module, probes: Sequence[Probe], error: Exception) -> None:
        """Handle a module that refuses a hook: the readings that need it are missing, the others continue."""
        lost = {name for probe in probes for name in probe.from_modules or [own.name for own in probe.metrics or ()]}
        if type(module).__name__ not in self._refusing:
            self._refusing.add(type(module).__name__)
            _log.warning(
                "%s refuses hooks (%s: %s); training goes on, but %s cannot include it",
                type(module).__name__, type(error).__name__, error, ", ".join(sorted(lost)),
            )  # fmt: skip
        self._refused |= lost

    def _tell(self, event: str, *args: Any) -> None:
        self.stopwatch.begin(_STATES[event], own=1)
        try:
            for probe, handle in self._listeners.get((event, self.step.measured)) or self._listening(event):
                try:
                    handle(*args)
                except Exception as error:
                    self.switch_off(probe, error)
        finally:
            self.stopwatch.__exit__(None, None, None)

    def _listening(self, event: str) -> list[tuple[Probe, Callable[..., Any]]]:
        """The probes that handle this event, and how: most probes ignore most events."""
        measured = self.step.measured
        listeners = self._listeners.get((event, measured))
        if listeners is None:
            nothing = getattr(Probe, event)
            listeners = [
                (probe, getattr(probe, event))
                for probe in self.probes
                if (measured or not probe.only_measured)
                and getattr(getattr(probe, event), "__func__", None) is not nothing
            ]
            self._listeners[event, measured] = listeners
        return listeners

    def _stepper(self, event: str, index: int) -> Callable[..., None]:
        def stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            closure = _closure(optimizer, args, kwargs)
            if self.step.measured and event == "before_update":
                self._refresh_parameters()
            if (event == "after_update") == (closure is not None):  # the gradients that are used exist now
                self._explain(index)
            self._tell(event, index, optimizer, self.step, closure is not None)

        return stepped

    def _any_steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before any optimizer of the process steps."""
        if self.step.measured and all(optimizer is not own for own in self._optimizers):
            with self.stopwatch:
                for probe, handle in self._listening("before_other_update"):
                    self.guard(probe, handle, optimizer)

    def _explain(self, index: int) -> None:
        """Look for passes that were missed, if the gradients that an optimizer uses come from no pass that was seen."""
        if self._finder.explains(index) or self._parameter_index is None:
            return
        if self.step.measured or self._is_heeded():
            self.step.unseen.add(index)
            parameters = self._parameter_index.parameters
            with self.stopwatch:
                self._finder.search([parameters[place] for place in self._parameter_index.of(index)])

    def _refresh_parameters(self) -> None:
        """Check whether the model's parameters have changed, before any probe asks for them."""
        if self._parameter_index is not None:
            with self.stopwatch:
                try:
                    self._parameter_index.refresh()
                except Exception as error:
                    self.report("list of parameters", "parameters", error)

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        finder = self._finder
        if finder.inside is not None and finder.inside is not module:  # a part of a pass that has begun
            return
        finder.inside = module
        self.stopwatch.begin(IN_FORWARD if module.training or torch.is_grad_enabled() else IN_EVALUATION)
        if self.kept is not None:
            self._keep_batch(self.kept, module, args, kwargs)
        if self.forward is None and not self.step.measured:
            return
        with self.stopwatch:
            self._end_forward(None)
            self.step.acted += self._finder.is_acting(module)
            if self.step.measured and self._finder.is_training(module):
                if not self.step.forwards:
                    self._refused = set()
                self.step.forwards[id(module)] += 1
                self.forward = ForwardPass(self, module, args, kwargs)
                try:
                    self.forward.begin()
                except BaseException:  # half of the hooks would measure half of the model
                    self._end_forward(None)
                    raise

    def _keep_batch(self, kept: KeptBatches, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.stopwatch:
            try:
                if self._finder.is_training(module):
                    kept.take(module, args, kwargs)
            except Exception as error:
                self.kept = None
                self.report("list of kept batches", "batches", error)

    def _end_forward(self, output: Any) -> None:
        """End a pass; one that was interrupted ends when the next begins."""
        if self.forward is not None:
            try:
                self.forward.end(output)
            finally:
                self.forward = None
                STAND_IN.remove(*self._dependencies.order)  # also where a probe failed to

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        finder = self._finder
        if finder.inside is not None and finder.inside is not module:
            return
        finder.inside = None
        self.stopwatch.begin(EVALUATION_ENDED if self.stopwatch.state == IN_EVALUATION else FORWARD_ENDED)
        if self.forward is not None:
            with self.stopwatch:
                self._end_forward(output)
        if not finder.is_training(module) or "backward" in self.failures:
            return
        if not self.step.measured and not self._is_heeded():
            return
        try:
            for tensor in differentiable(output)[:_MAX_WATCHED_OUTPUTS]:
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(self._reached_hook)  # a hook on the tensor takes twice as long
        except Exception as error:  # an output that cannot even be inspected
            self.report("watch on the backward pass", "backward", error)

    def _is_heeded(self) -> bool:
        """Whether any probe needs the backward passes of unmeasured steps."""
        for event in ("backward_ended", "backward_begins"):
            for probe, _ in self._listeners.get((event, self.step.measured)) or self._listening(event):
                try:
                    if probe.needs_every_backward():
                        return True
                except Exception as error:
                    self.switch_off(probe, error)
        return False

    def _parameter_reached(self, gradient: Tensor) -> bool:
        """Whether the gradient of a parameter is the first sign of a backward pass that a probe needs."""
        if torch._C._current_graph_task_id() == self._graph_task or not (self.step.measured or self._is_heeded()):
            return False
        self._backward_reached(gradient)
        return True

    def _backward_reached(self, gradients: object) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._graph_task or self.is_closed:
            return
        self._graph_task = task
        self._tell("backward_begins", self.step)
        if self.step.measured:
            self._follow()
        self._at_the_end(self._ended_hook)

    def _follow(self) -> None:
        """Register the hooks that probes want on parameters."""
        self._parameter_hooks.remove()
        with self.stopwatch:
            for probe in list(self.probes):
                self.guard(probe, self._follow_for, probe)

    def _follow_for(self, probe: Probe) -> None:
        for tap in probe.gradient_taps():
            self._parameter_hooks.put(tap.tensor, "register_hook", Reached(self, probe, tap.reached))

    def _backward_ended(self) -> None:
        """All gradients are computed. DDP averages them over the ranks in its own callback, which must run first."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._at_the_end(self._settled_hook)
        else:
            self._gradients_settled()

    def _gradients_settled(self) -> None:
        if self._parameter_hooks:
            self._parameter_hooks.remove()
        if not self.is_closed:
            self._finder.backward_ended()
            self._tell("backward_ended", self.step)

    def _at_the_end(self, hook: Hook) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(hook)
        except Exception as error:  # compiled autograd accepts no callback
            self.report("watch on the backward pass", "backward", error)


def _closure(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure of an optimizer step, if it has one."""
    positional = args[1:] if args and args[0] is optimizer else args  # torch passes the optimizer as well
    return kwargs.get("closure", positional[0] if positional else None)


def _ready(pending: Pending) -> Pending:
    """The readings with host tensors already copied: here a failure can still be tied to its probe."""
    return pending._replace(tensors=[_at_hand(numbers) for numbers in pending.tensors]) if pending.tensors else pending


def _at_hand(numbers: Value) -> Value:
    if isinstance(numbers, float):
        return numbers
    if not isinstance(numbers, Tensor) or numbers.is_cpu:
        return on_host(numbers)
    if numbers.is_meta:
        raise TypeError("a tensor on the meta device has no values")
    return numbers
