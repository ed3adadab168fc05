"""What `forewarn run` finds in training loops of many shapes. Each loop computes its own norms and losses."""

from __future__ import annotations

import copy
import gc
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import forewarn
from forewarn.integrations.discovery import PATIENCE, Discovery, Losses, Rounds
from forewarn.integrations.script import Ending

STEPS = 12
Expected = list[tuple[float, float]]
"""Per step: the gradient norm before clipping, and the loss."""


def norm(*models: nn.Module) -> float:
    """The global gradient norm in float64."""
    gradients = [own.grad.double() for model in models for own in model.parameters() if own.grad is not None]
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))


def network(width: int = 8, out: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, out))


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4)
    return x, x.sum(1, keepdim=True)


class Watched:
    """Runs a loop as `forewarn run` would, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ending = Ending()

    def __call__(self, loop: Callable[[], Any]) -> Any:
        gc.collect()
        discovery = Discovery({"run": self.path, "every": 1, "views": []})
        discovery.install()
        try:
            torch.manual_seed(0)
            return loop()
        finally:
            self.ending = discovery.finish("completed")

    def series(self, name: str, run: int = 0) -> list[float]:
        with forewarn.open_run(self.ending.runs[run]) as stored:
            return stored.series(name).values.tolist()

    def scopes(self, name: str, run: int = 0) -> set[str]:
        with forewarn.open_run(self.ending.runs[run]) as stored:
            return set(stored.scopes(name))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    before = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step
    yield Watched(tmp_path / "run")
    after = nn.Module.__call__, torch.autograd.backward, torch.optim.Optimizer.__init__, torch.amp.GradScaler.step
    assert before == after, "torch is left as it was"


def in_a_function() -> Expected:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = []
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(model), loss.item()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return expected


def in_a_trainer_class() -> Expected:
    class Trainer:
        def __init__(self) -> None:
            self.net = network()
            self.opt = torch.optim.AdamW([{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}])
            self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 5)

        def validate(self) -> None:
            self.net.eval()
            with torch.no_grad():
                functional.mse_loss(self.net(batch()[0]), batch()[1])
            self.net.train()

        def fit(self) -> Expected:
            expected = []
            for step in range(STEPS):
                if step % 4 == 0:
                    self.validate()
                x, y = batch()
                loss = functional.l1_loss(self.net(x), y)
                loss.backward()
                expected.append((norm(self.net), loss.item()))
                self.opt.step()
                self.schedule.step()
                self.opt.zero_grad()
            return expected

    return Trainer().fit()


def accumulating() -> Expected:
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(3):
            x, y = batch()
            loss = functional.mse_loss(model(x), y) / 3
            loss.backward()
            total += loss.item()
        expected.append((norm(model), total))
        optimizer.step()
        optimizer.zero_grad()
    return expected


def with_a_gradient_scaler() -> Expected:
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            prediction = model(x)
        loss = functional.mse_loss(prediction.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        expected.append((norm(model), loss.item()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return expected


def with_a_target_network() -> Expected:
    """One container holds the trained network, a copy that follows it, and a frozen teacher."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = network()
            self.target = copy.deepcopy(self.online)
            self.teacher = network().requires_grad_(False)

    agent, expected = Agent(), []
    optimizer = torch.optim.SGD(agent.online.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        with torch.no_grad():
            wanted = y + 0.1 * agent.target(x) + 0.1 * agent.teacher(x)
        loss = functional.mse_loss(agent.online(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(agent.online), loss.item()))
        optimizer.step()
        for follower, own in zip(agent.target.parameters(), agent.online.parameters(), strict=True):
            follower.data.lerp_(own.data, 0.1)
    return expected


def with_two_optimizers() -> Expected:
    model, expected = network(), []
    body = torch.optim.SGD(model[0].parameters(), lr=0.05)
    head = torch.optim.Adam(model[2].parameters())
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        expected.append((norm(model), loss.item()))
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
    return expected


def with_an_attack_on_the_inputs() -> Expected:
    """The gradients of the attack are thrown away, and so is its loss."""
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        x.requires_grad_(True)
        functional.mse_loss(model(x), y).backward()
        worse = (x + 0.01 * x.grad.sign()).detach()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(worse), y)
        loss.backward()
        expected.append((norm(model), loss.item()))
        optimizer.step()
    return expected


def with_optimizers_that_are_never_used() -> Expected:
    others = [network(), network()]
    unused = [torch.optim.Adam(other.parameters()) for other in others]
    expected = in_a_function()
    assert unused
    return expected[1:]  # only the first step shows which models are trained


def with_optimizers_for_two_phases() -> Expected:
    """Both hold the same parameters, so the second is known only when it steps; its first step is not seen."""
    model, expected = network(), []
    for optimizer in (torch.optim.Adam(model.parameters()), torch.optim.LBFGS(model.parameters(), lr=0.1)):
        for step in range(STEPS):
            x, y = batch()

            def closure() -> Tensor:
                optimizer.zero_grad()  # noqa: B023
                loss = functional.mse_loss(model(x), y)  # noqa: B023
                loss.backward()
                values.append((norm(model), loss.item()))  # noqa: B023
                return loss

            values: Expected = []
            optimizer.step(closure)
            if step or isinstance(optimizer, torch.optim.Adam):
                expected.append((values[-1][0], values[0][1]))
    return expected


def in_evaluation_mode() -> Expected:
    """A model that is only fine-tuned may stay in this mode; then only the first step shows that it is trained."""
    model, expected = network().eval(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(model), loss.item()))
        optimizer.step()
    return expected[1:]


def with_a_wrapped_optimizer() -> Expected:
    """An optimizer that steps another one inside its own step."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model, expected = network(), []
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.05))
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(model), loss.item()))
        optimizer.step()
    return expected[1:]


def with_a_closure() -> Expected:
    """LBFGS calls the closure many times; the loss is that of the first call, the norm that of the last."""
    model, expected = network(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for _ in range(STEPS):
        x, y = batch()
        evaluations: Expected = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)  # noqa: B023
            loss.backward()
            evaluations.append((norm(model), loss.item()))  # noqa: B023
            return loss

        optimizer.step(closure)
        assert len(evaluations) > 1
        expected.append((evaluations[-1][0], evaluations[0][1]))
    return expected


def adversarial(critic_steps: int = 1, in_one_module: bool = False) -> Expected:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = network(out=4), network()

    both, expected = Both(), []
    generator, critic = both.generator, both.critic
    if not in_one_module:
        del both
    slow = torch.optim.SGD(generator.parameters(), lr=0.01)
    fast = torch.optim.SGD(critic.parameters(), lr=0.01)
    judged, real, fake = functional.binary_cross_entropy_with_logits, torch.ones(16, 1), torch.zeros(16, 1)
    for _ in range(STEPS):
        losses = []
        for _ in range(critic_steps):
            critic.zero_grad()
            first = judged(critic(batch()[0]), real)
            first.backward()
            second = judged(critic(generator(batch()[0]).detach()), fake)
            second.backward()
            squares = norm(critic) ** 2
            losses.append(first.item() + second.item())
            fast.step()
        generator.zero_grad()
        last = judged(critic(generator(batch()[0])), real)
        last.backward()
        expected.append((math.sqrt(squares + norm(generator) ** 2), sum(losses) / critic_steps + last.item()))
        slow.step()
    return expected


def adversarial_in_one_module() -> Expected:
    return adversarial(in_one_module=True)


def with_five_critic_steps() -> Expected:
    return adversarial(critic_steps=5)


def compiled() -> Expected:
    model, expected = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        fast(batch()[0])  # before the training, while calls are noticed
    for _ in range(STEPS):
        x, y = batch()
        loss = functional.mse_loss(fast(x), y)
        optimizer.zero_grad()
        loss.backward()
        expected.append((norm(model), loss.item()))
        optimizer.step()
    return expected


def with_a_new_optimizer_midway() -> Expected:
    model, expected = network(), []
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            x, y = batch()
            loss = functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            expected.append((norm(model), loss.item()))
            optimizer.step()
    return expected


OFTEN = (accumulating, with_a_gradient_scaler, with_five_critic_steps)
"""Loops that `make test` runs."""
SELDOM = (
    in_a_function, in_a_trainer_class, with_a_target_network, with_two_optimizers, with_an_attack_on_the_inputs,
    with_optimizers_that_are_never_used, with_optimizers_for_two_phases, with_a_new_optimizer_midway,
    in_evaluation_mode, with_a_wrapped_optimizer, with_a_closure, adversarial, adversarial_in_one_module, compiled,
)  # fmt: skip


@pytest.mark.parametrize("loop", [*OFTEN, *(pytest.param(loop, marks=pytest.mark.ci) for loop in SELDOM)])
def test_norm_and_loss_are_found_in(loop: Callable[[], Expected], watched: Watched) -> None:
    expected = watched(loop)
    assert not watched.ending.remarks
    assert len(watched.ending.runs) == 1
    norms, losses = zip(*expected, strict=True)
    assert watched.series("gradient/global_norm") == pytest.approx(norms, rel=1e-5)
    assert watched.series("train/loss") == pytest.approx(losses, rel=1e-5)


def test_the_first_step_is_measured_in_full(watched: Watched) -> None:
    watched(in_a_function)
    with forewarn.open_run(watched.ending.runs[0]) as stored:
        for name in ("activation/std", "update/ratio", "gradient/norm", "gradient/global_norm"):
            assert stored.series(name, next(iter(stored.scopes(name)))).steps[0] == 0, name


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        x, y = batch()
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()


def test_each_fold_of_a_cross_validation_is_a_run(watched: Watched) -> None:
    def folds() -> None:
        kept = []
        for width in (5, 6, 7):
            model = network(width)
            optimizer = torch.optim.Adam(model.parameters())
            trained(model, optimizer)
            kept.append((model, optimizer))  # both stay alive

    watched(folds)
    assert [len(watched.series("train/loss", run)) for run in range(3)] == [STEPS] * 3


@pytest.mark.ci
def test_models_that_are_trained_in_turn_are_a_run_each(watched: Watched) -> None:
    def in_turn() -> None:
        models = [network(5), network(6)]
        pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.05)) for model in models]
        for pair in pairs:
            trained(*pair)

    watched(in_turn)
    assert [len(watched.series("train/loss", run)) for run in range(2)] == [STEPS - 1, STEPS]


def used_scaler() -> torch.amp.GradScaler:
    """A scaler that a training before this one has used."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    return scaler


@pytest.mark.ci
@pytest.mark.parametrize("earlier", [(), (used_scaler,)], ids=["one scaler", "one of an earlier training"])
def test_a_step_that_the_scaler_skips_is_a_step(earlier: tuple[Callable[[], Any], ...], watched: Watched) -> None:
    kept = [make() for make in earlier]

    def overflowing() -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
        for _ in range(STEPS):
            x, y = batch()
            scaler.scale(10 * functional.mse_loss(model(x), y + 1)).backward()  # too large at first
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    watched(overflowing)
    assert len(kept) == len(earlier)
    skipped = watched.series("update/skipped")
    assert len(skipped) == STEPS
    assert skipped[0] == 1
    assert skipped[-1] == 0
    assert all(math.isfinite(loss) for loss in watched.series("train/loss"))


@pytest.mark.ci
def test_optimizers_that_are_new_every_few_steps_end_in_one_sentence(watched: Watched) -> None:
    def inner_loops() -> None:
        for _ in range(20):
            model = network()
            trained(model, torch.optim.SGD(model.parameters(), lr=0.05), 3)

    watched(inner_loops)
    assert len(watched.ending.runs) == 5
    assert len(watched.ending.remarks) == 1
    assert "new optimizers every few steps" in watched.ending.remarks[0]
    assert "monitor.step(loss)" in watched.ending.remarks[0]


@pytest.mark.ci
def test_tensors_outside_of_any_module_end_in_one_sentence(watched: Watched) -> None:
    def fit_a_tensor() -> None:
        weight = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            ((weight - 1) ** 2).sum().backward()
            optimizer.step()

    watched(fit_a_tensor)
    assert not watched.ending.runs
    assert len(watched.ending.remarks) == 1
    assert "belong to no nn.Module" in watched.ending.remarks[0]


def test_training_is_bit_identical_and_draws_no_random_number(watched: Watched) -> None:
    def states() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        trained(model, torch.optim.AdamW(model.parameters()))
        return [*model.state_dict().values(), torch.get_rng_state()]

    with_monitor = watched(states)
    torch.manual_seed(0)
    assert all(map(torch.equal, with_monitor, states()))


def test_a_step_is_complete_when_every_partner_has_stepped() -> None:
    rounds = Rounds(2)
    assert [rounds.stepped(index) for index in (0, 0, 0, 1, 0, 1)] == [False, False, False, True, False, True]


def test_an_optimizer_that_never_steps_does_not_hold_the_others_up() -> None:
    rounds = Rounds(2)
    assert [rounds.stepped(0) for _ in range(PATIENCE + 3)] == [False] * PATIENCE + [True] * 3
    assert not rounds.stepped(1)  # it takes part from now on
    assert rounds.stepped(0)


def test_a_loss_with_a_gradient_counts_with_it() -> None:
    """`critic(x).backward(-ones)` is the objective −Σ critic(x)."""
    losses = Losses(1)
    losses.add(torch.tensor([2.0, 3.0]), torch.tensor([-1.0, -1.0]))
    losses.add([torch.tensor(1.0), torch.tensor(4.0)], None)
    losses.stepped(0)
    assert float(losses.take() or 0.0) == 0.0
    losses.stepped(0)
    assert losses.take() is None


HUGGING_FACE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
tokens = [torch.randint(0, 50, (16,)) for _ in range(48)]
data = [{"input_ids": row, "labels": row} for row in tokens]
settings = TrainingArguments(
    "out", max_steps=12, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
)
Trainer(model=model, args=settings, train_dataset=data).train()
"""
LIGHTNING = """
import lightning
import torch
from torch import nn

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

torch.manual_seed(0)
model, x = Module(), torch.randn(192, 4)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16)
lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu").fit(model, data)
"""
STATE = """
print("state", sum(weight.double().sum().item() for weight in model.parameters()), torch.rand(1).item())
"""


@pytest.mark.integrations
@pytest.mark.parametrize("source", [HUGGING_FACE, LIGHTNING], ids=["huggingface", "lightning"])
def test_a_framework_gets_its_adapter_and_is_watched_once(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source + STATE)
    ended = [
        subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        for command in ([], ["-m", "forewarn", "run", "--run", "runs/mine"])
    ]
    states = [[line for line in said.stdout.splitlines() if line.startswith("state")] for said in ended]
    assert states[0] == states[1] != []
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert ended[1].stderr.count("Health checks") == 1
    with forewarn.open_run(tmp_path / "runs" / "mine") as stored:
        assert stored.num_steps == 12
        assert len(stored.series("gradient/global_norm").values) == 12
        assert len(stored.series("train/loss").values) == 12
