"""The example GPT trained for a few steps at several widths, with the refined coordinate check on every step."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forewarn.lab.coordinates.exponents import LEAST_WIDTHS, Growths, Term, growth
from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPTConfig, token_loss
from forewarn.lab.mup import Parametrization, adam_groups, gpt_at_width
from forewarn.standalone import ModuleMonitor, RefinedCoordinateCheck

DEPTH, HEADS, CONTEXT, BATCH_SIZE = 2, 4, 32, 8

ADAM_EPS = 1e-12
"""Gradients shrink with width; torch's default of 1e-8 would limit the updates of wide models only."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The measurements of one parametrization."""

    parametrization: Parametrization
    widths: tuple[int, ...]
    values: dict[str, dict[Term, NDArray[np.float64]]]
    """By layer and term: the root mean square of a coordinate, [steps × widths × seeds]; the first after one update."""
    losses: NDArray[np.float64]
    """After the last update, [widths × seeds]."""

    @property
    def num_steps(self) -> int:
        return len(next(iter(next(iter(self.values.values())).values())))

    def growths(self, step: int = -1) -> Growths:
        """How each term of each layer grows with width, after the last update or an earlier one."""
        return {
            layer: {term: growth(self.widths, values[step]) for term, values in terms.items()}
            for layer, terms in self.values.items()
        }


def sweep(
    parametrization: Parametrization,
    widths: Sequence[int],
    num_steps: int,
    num_seeds: int,
    lr: float,
    tell: Callable[[str], None],
) -> Sweep:
    """Train at every width from every seed; `tell` is called before each run with its description.

    At the smallest width both parametrizations are the example GPT itself, and `lr` is the one found for it.
    """
    check_widths(widths)
    text = stdlib_text()
    coordinates: dict[str, dict[Term, NDArray[np.float64]]] = {}
    losses = np.full((len(widths), num_seeds), np.nan)
    for seed in range(num_seeds):
        for index, width in enumerate(widths):
            tell(f"{parametrization}, width {width}, seed {seed}")
            batches = TokenBatches(text, BATCH_SIZE, CONTEXT, seed)
            trained = _train(parametrization, width, min(widths), num_steps, lr, seed, batches)
            losses[index, seed] = trained.loss
            for (layer, term), values in trained.values.items():
                shape = (num_steps, len(widths), num_seeds)
                coordinates.setdefault(layer, {}).setdefault(term, np.full(shape, np.nan))[:, index, seed] = values
    return Sweep(parametrization, tuple(widths), coordinates, losses)


def check_widths(widths: Sequence[int]) -> None:
    """Raise ValueError if no exponent can be fitted to these widths."""
    if len(set(widths)) < LEAST_WIDTHS:
        raise ValueError(f"{len(set(widths))} widths are too few for an exponent with its error: give {LEAST_WIDTHS}")
    wrong = [width for width in widths if width < HEADS or width % HEADS]
    if wrong:
        raise ValueError(f"width {wrong[0]} does not split into {HEADS} attention heads: give multiples of {HEADS}")


@dataclass(frozen=True, slots=True)
class _Trained:
    values: dict[tuple[str, Term], list[float]]
    loss: float


def _train(
    parametrization: Parametrization,
    width: int,
    base_width: int,
    num_steps: int,
    lr: float,
    seed: int,
    batches: TokenBatches,
) -> _Trained:
    config = GPTConfig(context=CONTEXT, depth=DEPTH, heads=HEADS, width=width, tied=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = gpt_at_width(config, base_width, parametrization)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(adam_groups(model, lr, base_width, parametrization), eps=ADAM_EPS)
    kinds = nn.Linear | nn.LayerNorm | nn.Embedding
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    values: dict[tuple[str, Term], list[float]] = {}
    with ModuleMonitor(monitor_step_fn=lambda step: step > 0) as monitor:
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor, modules="|".join(rf"{re.escape(name)}$" for name in layers))
        for step in range(num_steps + 1):
            inputs, targets = next(batches)
            if monitor.begin_step(step):
                reference(inputs)
            loss = token_loss(model(inputs), targets)
            check.refined_coordinate_check()
            monitor.end_step()
            for key, value in _coordinates(monitor.get_step_metrics(), layers).items():
                values.setdefault(key, []).append(value)
            if step < num_steps:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        check.close()
    return _Trained(values, loss.item())


def _coordinates(
    metrics: Mapping[str, float], layers: Mapping[str, nn.Linear | nn.LayerNorm | nn.Embedding]
) -> dict[tuple[str, Term], float]:
    """The root mean square of a coordinate of each term: a norm alone grows with the number of coordinates."""
    coordinates: dict[tuple[str, Term], float] = {}
    for name, layer in layers.items():
        num_inputs = layer.weight.shape[-1]
        num_outputs = num_inputs if isinstance(layer, nn.Embedding) else layer.weight.shape[0]
        for term in Term:
            is_output = term in (Term.UPDATE, Term.PASSED_ON)
            # Without the bias, which does not scale with width: the question is about the matrix.
            place = f"{name}.weight" if is_output and not isinstance(layer, nn.Embedding) else name
            norm = metrics.get(f"RCC {term}/{place}/l2norm")
            if norm is not None:
                coordinates[name, term] = norm / math.sqrt(num_outputs if is_output else num_inputs)
    return coordinates
