"""How the cost of a step grows with the number of elements and with the number of tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.optim import SGD

from forewarn.attach import watch
from forewarn.config import Config
from forewarn.lab.bench.cells import duration
from forewarn.lab.bench.contender import MAX_NORM

ELEMENTS = (1_000_000, 2_000_000, 5_000_000, 10_000_000, 20_000_000, 50_000_000)
LARGE_ELEMENTS = (100_000_000, 200_000_000)
TENSORS = (10, 30, 100, 300, 1_000, 3_000, 5_000)
FIXED_TENSORS = 100
FIXED_ELEMENTS = 5_000_000
REPEATS = 5
WARM_UP_REPEATS = 1
BYTES_PER_ELEMENT = 16
"""A float32 weight, its gradient, and as much again for temporary tensors."""
LARGEST_MEMORY_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Line:
    """A least-squares line, and how well the points fit it."""

    slope: float
    intercept: float
    r_squared: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> Self:
        slope, intercept = np.polyfit(x, y, 1)
        residual = np.asarray(y) - (slope * np.asarray(x) + intercept)
        total = np.asarray(y) - np.mean(y)
        scatter = float(total @ total)
        return cls(float(slope), float(intercept), 1 - float(residual @ residual) / scatter if scatter else 1.0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the cost of a step grows along one axis while the other stays fixed."""

    axis: str
    """`elements` or `tensors`."""
    fixed: str
    sizes: tuple[int, ...]
    measured_seconds: tuple[float, ...]
    unmeasured_seconds: tuple[float, ...]
    line: Line
    """The fit of `measured_seconds`."""
    left_out: tuple[int, ...]
    """Sizes for which this machine has too little memory."""


class Weights(nn.Module):
    """A model of nothing but parameters of equal size."""

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        super().__init__()
        size = num_elements // num_tensors
        self.parts = nn.ParameterList(nn.Parameter(torch.full((size,), 0.1)) for _ in range(num_tensors))

    def forward(self) -> Tensor:
        return torch.stack([part.square().mean() for part in self.parts]).sum()


def num_cases(large: bool) -> int:
    """Number of models that `scaling` measures if there is memory for all."""
    return len(ELEMENTS) + len(TENSORS) + (len(LARGE_ELEMENTS) if large else 0)


def scaling(directory: Path, tell: Callable[[str], None], *, large: bool) -> tuple[Scaling, Scaling]:
    """The cost against elements at a fixed number of tensors, and against tensors at a fixed number of elements."""
    allowed = LARGEST_MEMORY_SHARE * psutil.virtual_memory().available / BYTES_PER_ELEMENT
    elements = (*ELEMENTS, *(LARGE_ELEMENTS if large else ()))
    return (
        _along(
            "elements",
            f"{FIXED_TENSORS} tensors",
            [(size, FIXED_TENSORS, size) for size in elements if size <= allowed],
            tuple(size for size in elements if size > allowed),
            directory,
            tell,
        ),
        _along(
            "tensors",
            f"{FIXED_ELEMENTS:,} elements",
            [(count, count, FIXED_ELEMENTS) for count in TENSORS],
            (),
            directory,
            tell,
        ),
    )


def _along(
    axis: str,
    fixed: str,
    cases: Sequence[tuple[int, int, int]],
    left_out: tuple[int, ...],
    directory: Path,
    tell: Callable[[str], None],
) -> Scaling:
    sizes, measured, unmeasured = [], [], []
    for size, num_tensors, num_elements in cases:
        tell(f"scaling: {size:,} {axis}")
        detailed, plain = step_costs(num_tensors, num_elements, directory / f"{axis}-{size}")
        sizes.append(size)
        measured.append(detailed)
        unmeasured.append(plain)
    return Scaling(
        axis, fixed, tuple(sizes), tuple(measured), tuple(unmeasured), Line.through(sizes, measured), left_out
    )


def step_costs(num_tensors: int, num_elements: int, directory: Path) -> tuple[float, float]:
    """CPU seconds that forewarn adds to a measured and to an unmeasured step of clipping and `optimizer.step()` alone.

    Gradients are computed once and kept. Two optimizers share the weights, and only one of them is monitored.
    """
    model = Weights(num_tensors, num_elements)
    model().backward()
    parameters = list(model.parameters())
    alone, watched = SGD(parameters, lr=1e-6), SGD(parameters, lr=1e-6)
    added: dict[bool, list[float]] = {True: [], False: []}
    config = Config(escalation_steps=0)
    with watch(model, watched, directory, every=lambda step: step % 2 == 0, config=config, views=[]) as monitor:
        for step in range(2 * (WARM_UP_REPEATS + REPEATS)):
            begin = time.process_time()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            alone.step()
            between = time.process_time()
            monitor.clip_grad_norm_(MAX_NORM)
            watched.step()
            monitor.step(1.0)
            end = time.process_time()
            added[step % 2 == 0].append((end - between) - (between - begin))
    detailed, plain = (statistics.median(added[kind][WARM_UP_REPEATS:]) for kind in (True, False))
    return detailed, plain


def scaling_sentence(scaling: Scaling) -> str:
    """The fit along one axis, in words."""
    unit = "element" if scaling.axis == "elements" else "tensor"
    slope = scaling.line.slope
    per = f"{slope * 1e9:.3g} ns" if abs(slope) < 1e-6 else duration(slope)
    text = (
        f"Against {scaling.axis}, at {scaling.fixed}: {per} per {unit} and {duration(scaling.line.intercept)} besides "
        f"(R² {scaling.line.r_squared:.4f})."
    )
    if scaling.left_out:
        text += f" Left out for want of memory: {', '.join(f'{count:,}' for count in scaling.left_out)} {scaling.axis}."
    return text
