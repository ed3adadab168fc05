"""Whether forewarn keeps its promises on this machine and device, on three small models, in under a minute."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import forewarn
from forewarn.lab.bench.cells import duration, share
from forewarn.lab.bench.counting import Operations
from forewarn.lab.networks import CNN
from forewarn.measure.engine import COLUMNS, cuda, native, portable
from forewarn.monitor import Monitor

NUM_CLASSES = 10
SAME_STEPS = 12
"""Steps of training that are compared bit for bit."""
COUNTED_STEPS = 4
TIMED_STEPS, WARM_UP_STEPS = 40, 8
LARGEST_ERROR = 1e-12
"""Of a sum in double precision, relative to the sum of the magnitudes: only the order of the additions may differ."""
_SUMS = [COLUMNS.index("sum"), COLUMNS.index("sum_squares")]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check."""

    check: str
    subject: str
    """The model or backend that was checked."""
    passed: bool | None
    """None if there is nothing to pass, or it could not be checked."""
    words: str
    figures: dict[str, float] = field(default_factory=dict)


class Encoder(nn.Module):
    """Two blocks of a transformer and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(64, NUM_CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(sequences).mean(1))
        return logits


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, NUM_CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (_perceptron, (32, 64)),
    "convolutions": (lambda: CNN((3, 16, 32), NUM_CLASSES), (16, 3, 16, 16)),
    "transformer": (Encoder, (8, 32, 64)),
}
"""By name: what makes the model, and the shape of its inputs."""


class Training:
    """A model that trains on noise, the same in every instance; watched if `watch` makes a monitor."""

    def __init__(
        self, name: str, device: str, watch: Callable[[nn.Module, torch.optim.Optimizer], Monitor] | None = None
    ) -> None:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        self.model = make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(shape).to(device)
        self.labels = torch.randint(NUM_CLASSES, shape[:1]).to(device)
        self.losses: list[Tensor] = []
        self.monitor = None if watch is None else watch(self.model, self.optimizer)

    def step(self) -> None:
        loss = cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        if self.monitor is not None:
            self.monitor.step(loss)

    def bits(self) -> list[bytes]:
        """Everything that the steps have changed: losses, weights, the optimizer's state, random numbers."""
        state = [*self.losses, *self.model.state_dict().values()]
        for values in self.optimizer.state_dict()["state"].values():
            state += [value for value in values.values() if isinstance(value, Tensor)]
        states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
        return [tensor.cpu().numpy().tobytes() for tensor in (*state, *states)]

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


class Watches:
    """Makes monitors that record into directories of their own and print nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0

    def __call__(self, every: int | Callable[[int], bool]) -> Callable[[nn.Module, torch.optim.Optimizer], Monitor]:
        self._made += 1
        path = self._folder / str(self._made)
        return lambda model, optimizer: forewarn.watch(model, optimizer, path, every=every, views=[])


def run_checks(device: str, folder: Path) -> Iterator[Result]:
    """Every check on a device; `folder` takes the recorded runs."""
    watches = Watches(folder)
    yield from (same_bits(name, device, watches) for name in MODELS)
    yield from (right_numbers(*backend, device) for backend in _backends(device))
    yield from (no_waiting(name, device, watches) for name in MODELS)
    yield from (cost(name, device, watches) for name in MODELS)


def device_name(device: str) -> str:
    """The device as its maker calls it, and how many threads torch uses on a CPU."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device}, {torch.get_num_threads()} threads"


def same_bits(name: str, device: str, watches: Watches) -> Result:
    """Whether a watched model trains to the same bits as one that is not, and draws the same random numbers."""
    ends = []
    for watch in (None, None, watches(1)):
        training = Training(name, device, watch)
        for _ in range(SAME_STEPS):
            training.step()
        training.close()
        ends.append(training.bits())
    bare, again, watched = ends
    if bare != again:
        return Result("same bits", name, None, "not known: two runs without forewarn differ on this device")
    words = f"{SAME_STEPS} measured steps: losses, weights, optimizer and random numbers"
    return Result("same bits", name, watched == bare, f"{words} {'are equal' if watched == bare else 'DIFFER'}")


Reader = Callable[[Sequence[Tensor]], Any]


def _backends(device: str) -> Iterator[tuple[str, str, Reader]]:
    """The backends for a device: the name, why it is not available (empty if it is), and what reads tensors."""
    if torch.device(device).type == "cpu":
        yield "native", native.why_not(), lambda tensors: native.measure(tensors, 0)[0]
    elif torch.device(device).type == "cuda":
        yield "triton", cuda.why_not(), lambda tensors: cuda.measure(tensors)[0]
    yield "portable", "", lambda tensors: portable.measure(tensors)[0]


def right_numbers(backend: str, why_not: str, read: Reader, device: str) -> Result:
    """Whether a backend agrees with numpy in double precision, on tensors of many kinds."""
    check = "right numbers"
    if why_not:
        return Result(check, backend, None, f"not available: {why_not}")
    tensors = [tensor.to(device) for tensor in _tensors()]
    rows = np.asarray(torch.as_tensor(read(tensors)).cpu(), np.float64)
    worst = 0.0
    for tensor, row in zip(tensors, rows, strict=True):
        expected, scale = _expected(tensor.double().cpu().numpy().ravel())
        errors = np.abs(row - expected)
        errors[_SUMS] /= np.maximum(scale, np.finfo(float).tiny)
        worst = max(worst, float(errors.max()))
    words = f"{len(tensors)} tensors, largest error {worst:.1g} (limit {LARGEST_ERROR:.0e})"
    return Result(check, backend, worst <= LARGEST_ERROR, words, {"largest_error": worst})


def _tensors() -> Iterator[Tensor]:
    """Tensors of each type in several sizes, with zeros, one with values that are not finite, one not contiguous."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for size in (1, 1000, 100_003):
            values = torch.randn(size, generator=generator)
            values[::7] = 0.0
            yield values.to(dtype)
        for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            values[number::1000] = value
        yield values.to(dtype)
        yield torch.randn(64, 48, generator=generator).to(dtype).t()


def _expected(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[Any, Any]:
    """The row of a tensor, and what was added up in its sums."""
    finite = values[np.isfinite(values)]
    squares = (finite * finite).sum()
    row = [
        values.size, finite.sum(), squares, finite.min(), finite.max(), (values == 0).sum(), values.size - finite.size,
    ]  # fmt: skip
    return np.array(row), np.array([np.abs(finite).sum(), squares])


def no_waiting(name: str, device: str, watches: Watches) -> Result:
    """Whether the monitor ever waits for the device, on measured steps and on others."""
    bare = _syncs(Training(name, device))
    light, measured = (_syncs(Training(name, device, watches(every))) for every in (_never, 1))
    added = {"light": light - bare, "measured": measured - bare}
    words = " · ".join(f"{kind} steps: {number} host syncs" for kind, number in added.items())
    return Result("no waiting", name, not any(added.values()), words, {k: float(v) for k, v in added.items()})


def _never(step: int) -> bool:
    return False


def _syncs(training: Training) -> int:
    """The operations of a few steps that wait for the device: as dispatched, and on CUDA as its runtime counts them."""
    on_cuda = training.inputs.is_cuda
    operations = Operations()
    with ExitStack() as stack:
        stack.enter_context(operations)
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if on_cuda:
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(COUNTED_STEPS):
            training.step()
    training.close()
    return operations.syncs + sum("synchronizing CUDA operation" in str(warning.message) for warning in told)


def cost(name: str, device: str, watches: Watches) -> Result:
    """What the monitor adds to a step that it reads in brief, and to one that it measures in detail."""
    trainings = [Training(name, device), *(Training(name, device, watches(every)) for every in (_never, 1))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = np.array([[_seconds(training) for training in trainings] for _ in range(WARM_UP_STEPS + TIMED_STEPS)])
    finally:
        torch.set_num_threads(threads)
        for training in trainings:
            training.close()
    timed = seconds[WARM_UP_STEPS:]
    bare = float(np.median(timed[:, 0]))
    light, measured = map(float, np.median(timed[:, 1:] - timed[:, :1], axis=0))
    words = [f"{kind} {_added(took, bare)}" for kind, took in (("light", light), ("measured", measured))]
    figures = {"bare_seconds": bare, "light_seconds": light, "measured_seconds": measured}
    return Result("cost", name, None, " · ".join([f"step {duration(bare)}", *words]), figures)


def _added(seconds: float, bare: float) -> str:
    return f"+{duration(seconds)} ({share(seconds / bare)})" if seconds > 0 else "below noise"


def _seconds(training: Training) -> float:
    """The time of one step: CPU time of the thread that trains, or with a GPU the time until it is done."""
    if not training.inputs.is_cuda:
        began = time.thread_time()
        training.step()
        return time.thread_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    training.step()
    torch.cuda.synchronize()
    return time.perf_counter() - began
