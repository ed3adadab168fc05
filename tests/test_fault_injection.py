"""Every function of the monitor raises in turn: training goes on bit for bit, and an interrupt still interrupts.

The functions are discovered by watching a loop that uses every part. A function that torch or the user calls with no
other function of ours on the stack is a door: it is the guard, and a fault at its entry would be outside of it, so
faults are put into what the doors call. Two parts are treated differently: an error within `watch` may be raised by
`watch`, before anything is attached; the writer's thread is not in the loop (`tests/store/test_failure.py`).
"""

from __future__ import annotations

import copy
import gc
import io
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.measure.engine import dispatch
from forewarn.views.console import AlertLines
from tests.bitwise import plain, random_states, seed_everything

SOURCE = str(Path(forewarn.__file__).parent)
STEPS = 5
LAST_CALL = 8
"""The last call of a function that fails in these tests."""
ATTENTION = functional.scaled_dot_product_attention

DOORS = {
    "Hook.__call__", "StandIn._replacement.<locals>.scaled_dot_product_attention", "watch",
    "Monitor.step", "Monitor.clip_grad_norm_", "Monitor.combine_losses", "Monitor.log",
    "Monitor.end_epoch", "Monitor.adjust", "Monitor.firing", "Monitor.state_dict", "Monitor.close",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return x + self.act(self.mix(attended.transpose(1, 2).flatten(2)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gate = nn.Linear(8, 3)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Sigmoid(), nn.Linear(8, 11))

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.bn(self.conv(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = x + self.attention(x, x, x)[0]
        return {"logits": self.head(x), "gate": self.gate(x)}


class Drift(forewarn.Probe):
    """A probe of the user's own that uses every event."""

    name = "drift"
    metrics = (
        forewarn.Metric(
            "drift/embed", forewarn.Scope.RUN, forewarn.Cadence.EVERY_STEP, "", forewarn.Reduce.MEAN, "Its norm."
        ),
    )

    def __init__(self, model: Net) -> None:
        self.model = model

    def module_taps(self) -> list[forewarn.ModuleTap]:
        return [forewarn.ModuleTap(self.model.head, lambda args, kwargs: None, lambda args, kwargs, output: None)]

    def gradient_taps(self) -> list[forewarn.GradientTap]:
        return [forewarn.GradientTap(self.model.gate.weight, lambda gradient: None)]

    def collect(self, step: forewarn.Step) -> forewarn.Pending:
        norm = self.model.embed.weight.detach().norm()
        return forewarn.Pending([norm], lambda arrays: [forewarn.Reading("drift/embed", ("",), arrays[0])])


@pytest.fixture(autouse=True)
def _own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails is given up for the whole process; here, for one test."""
    monkeypatch.setattr(dispatch, "_broken", set())


class Run:
    """The same training, bare or watched."""

    def __init__(self) -> None:
        seed_everything(0)
        self.model = Net()
        late = list(self.model.head.parameters())
        early = [parameter for parameter in self.model.parameters() if all(parameter is not other for other in late)]
        self.optimizers = [torch.optim.AdamW(early, 1e-2), torch.optim.SGD(late, 1e-2, momentum=0.9)]
        self.losses: list[float] = []
        self.monitor: forewarn.Monitor | None = None
        reference = Net().eval()
        self.settings: dict[str, Any] = {
            "config": forewarn.Config(measure=forewarn.Measure(router="gate", histograms="sampled")),
            "views": [AlertLines(io.StringIO())],
            "metrics": [
                forewarn.ActivationMetric("size", lambda tensor: tensor.norm(), "head"),
                forewarn.ActivationDifferenceMetric("far", lambda a, b: (a - b).norm(), "gate", reference=reference),
            ],
            "probes": [Drift(self.model)],
        }

    def watch(self, run: Path) -> None:
        self.monitor = forewarn.watch(self.model, self.optimizers, run, every=2, **self.settings)

    def train(self, steps: int = STEPS) -> None:
        seed_everything(0)
        monitor = self.monitor
        for step in range(steps):
            for _ in range(2 if step == 2 else 1):
                tokens = torch.randint(0, 11, (3, 9)).roll(random.randrange(9), 1) + int(np.random.randint(0, 1))
                output = self.model(tokens)
                words = functional.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten())
                size = output["gate"].square().mean()
                if monitor is None:
                    loss = 1.0 * words + 0.5 * size
                else:
                    loss = monitor.combine_losses({"words": words, "size": size}, weights={"size": 0.5}, every=2)
                loss.backward()
            if step % 2 and monitor is not None:
                monitor.clip_grad_norm_(0.5)
            elif step % 2:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(loss.item())
            if monitor is not None:
                monitor.log("user/twice", 2 * loss.detach())
                monitor.step(loss if step != 3 else loss * float("nan"))
        if monitor is not None:
            monitor.end_epoch(val_loss=1.0)
            monitor.adjust()
            assert isinstance(monitor.firing, tuple)
            monitor.state_dict()

    def close(self) -> None:
        """As a user would: at the end, or after an interrupt."""
        if self.monitor is not None:
            self.monitor.close()

    def state(self) -> Any:
        return plain((self.losses, self.model.state_dict(), [one.state_dict() for one in self.optimizers]))


def leftovers(run: Run) -> list[Any]:
    """Everything that a monitor may have left behind on the model, its parameters, the optimizers and torch."""
    owners = [*run.model.modules(), *run.optimizers]
    hooks = [held for owner in owners for name, held in vars(owner).items() if "hooks" in name and held]
    hooks += [parameter._backward_hooks for parameter in run.model.parameters() if parameter._backward_hooks]
    return hooks + [functional.scaled_dot_product_attention] * (
        functional.scaled_dot_product_attention is not ATTENTION
    )


def is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(SOURCE)


def outermost(frame: FrameType) -> FrameType | None:
    """The door through which this call came; None if the frame is that itself."""
    door, above = None, frame.f_back
    while above is not None:
        door = above if is_ours(above) else door
        above = above.f_back
    return door


def traced(trace: Callable[..., Any], run: Run, path: Path) -> None:
    """A whole run under a trace function, which may raise.

    What is raised while Python finalizes a generator that nobody has used up is not raised anywhere.
    """
    gc.disable()  # nor is what is raised while an earlier run is collected
    before, sys.unraisablehook = sys.unraisablehook, lambda ignored: None
    sys.settrace(trace)
    try:
        run.watch(path)
        run.train()
        run.close()
    finally:
        sys.settrace(None)
        sys.unraisablehook = before
        gc.enable()


def raised(trace: Callable[..., Any], run: Run, path: Path) -> BaseException | None:
    """What comes out of a run under this trace function."""
    try:
        traced(trace, run, path)
    except (RuntimeError, KeyboardInterrupt) as error:
        return error
    return None


class Census:
    """How often each function of ours is called from inside, and which are doors."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.doors: set[str] = set()
        self.num_lines = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_ours(frame):
            return None
        if event == "line":
            self.num_lines += 1
        elif event == "call" and self.calls[frame.f_code] < LAST_CALL:
            if outermost(frame) is None:
                self.doors.add(frame.f_code.co_qualname)
            else:
                self.calls[frame.f_code] += 1
        return self


class Fault:
    """Raises once, at one call of one function."""

    def __init__(self, code: CodeType, call: int, error: type[BaseException]) -> None:
        self.code = code
        self.left = call
        self.error = error
        self.door = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is self.code and (door := outermost(frame)) is not None:
            self.left -= 1
            if self.left == 0:
                self.door = door.f_code.co_qualname
                raise self.error("injected")


class InterruptAtLine:
    """Raises a KeyboardInterrupt at one line of ours, counted over the whole run."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not is_ours(frame):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt("injected")
        return self


@pytest.fixture(scope="module", autouse=True)
def _one_thread_throughout() -> Iterator[None]:
    """Also where this module's fixtures train: sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Census:
    traced(lambda *event: None, Run(), tmp_path_factory.mktemp("first") / "run")  # what happens once in a process
    census = Census()
    traced(census, Run(), tmp_path_factory.mktemp("census") / "run")
    return census


@pytest.fixture(scope="module")
def bare() -> tuple[Any, Any]:
    run = Run()
    run.train()
    return run.state(), random_states()


def check_error(fault: Fault, path: Path, bare: tuple[Any, Any]) -> None:
    """Training is bit-identical, nothing is raised, and nothing is left behind."""
    run = Run()
    error = raised(fault, run, path)
    if fault.door == "watch" and error is not None:
        assert run.monitor is None
        run.train()
    else:
        assert error is None, f"{fault.code.co_qualname} reached the loop: {error!r}"
    assert (run.state(), random_states()) == bare, f"a fault in {fault.code.co_qualname} changed the training"
    assert leftovers(run) == [], f"a fault in {fault.code.co_qualname} left hooks behind"


def check_interrupt(fault: Any, path: Path, name: str) -> None:
    """The interrupt arrives, nothing is left behind after `close`, and training goes on without the monitor."""
    run = Run()
    error = raised(fault, run, path)
    if error is None:
        is_generator = isinstance(fault, Fault) and fault.code.co_name == "<genexpr>"
        assert fault.left > 0 or is_generator, f"an interrupt in {name} was swallowed"
    else:
        assert (type(error), str(error)) == (KeyboardInterrupt, "injected")
    run.close()
    assert leftovers(run) == [], f"an interrupt in {name} left hooks behind"
    twin = Run()
    twin.model.load_state_dict(run.model.state_dict())
    for optimizer, own in zip(twin.optimizers, run.optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    run.monitor, run.losses = None, []
    for one in (run, twin):
        for optimizer in one.optimizers:
            optimizer.zero_grad()
        one.train(2)
    assert run.state() == twin.state()


def sample(census: Census, share: int) -> list[CodeType]:
    """Every `share`-th function; another part of them for each Python that runs this, in a stable order."""
    codes = sorted(census.calls, key=lambda code: (code.co_filename, code.co_firstlineno, code.co_name))
    return codes[::share]


def test_the_doors_are_these(census):
    """A new door needs a guard: it belongs into this list once it has one."""
    assert census.doors == DOORS
    assert len(census.calls) > 400


@pytest.mark.parametrize("call", [1, 3])
def test_a_sample_of_failing_functions_changes_nothing(census, bare, tmp_path, call):
    for index, code in enumerate(sample(census, 29)):
        if census.calls[code] >= call:
            check_error(Fault(code, call, RuntimeError), tmp_path / str(index), bare)


def test_a_sample_of_interrupts_arrives_and_leaves_no_hook(census, tmp_path):
    chosen = random.Random(0)
    for index in range(24):
        line = chosen.randrange(census.num_lines) + 1
        check_interrupt(InterruptAtLine(line), tmp_path / str(index), f"line {line}")


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 3, LAST_CALL])
def test_every_failing_function_changes_nothing(census, bare, tmp_path, call):
    for index, code in enumerate(sample(census, 1)):
        if census.calls[code] >= call:
            check_error(Fault(code, call, RuntimeError), tmp_path / str(index), bare)


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 3, LAST_CALL])
def test_every_interrupted_function_leaves_no_hook(census, tmp_path, call):
    for index, code in enumerate(sample(census, 1)):
        if census.calls[code] >= call:
            check_interrupt(Fault(code, call, KeyboardInterrupt), tmp_path / str(index), code.co_qualname)


@pytest.mark.slow
def test_two_thousand_interrupts_leave_no_hook(census, tmp_path):
    chosen = random.Random(1)
    for index in range(2000):
        line = chosen.randrange(census.num_lines) + 1
        check_interrupt(InterruptAtLine(line), tmp_path / str(index), f"line {line}")
