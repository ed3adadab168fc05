"""Real training in epochs: healthy runs that must be left alone, and one for every rule about learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import forewarn
from forewarn.lab.data import TokenBatches, classification, images, sequences, split, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.lab.networks import CNN, MLP, LSTMClassifier
from tests.real_runs import Batches, loss_of, shuffled


def never(step: int) -> bool:
    """No tensor is measured: what the loss alone shows must be enough."""
    return False


class Run:
    """A model in training by epochs, with samples that it never sees."""

    def __init__(self, run: Path, model: nn.Module, training: Batches, held_out: list[tuple[Tensor, Tensor]]) -> None:
        self.run = run
        self.model = model
        self.training = training
        self.held_out = held_out
        self.lr = 1e-3
        self.weight_decay = 0.01
        self.clip: float | None = 1.0
        self.optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        self.rate: Callable[[int], float] = lambda step: 1.0
        self.hyperparameters: dict[str, Any] = {}
        self.every: Any = never
        self.planned_steps = 0
        """Steps for which the scheduler is declared as the plan; 0 for no plan."""
        self.resumes_after = 0
        """Epochs after which the monitor is closed and goes on from its saved state; 0 for never."""
        self.after_epoch: Callable[[forewarn.Monitor, torch.optim.Optimizer], None] = lambda monitor, optimizer: None

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        losses = [float(loss_of(self.model, *batch)) for batch in self.held_out]
        self.model.train()
        return sum(losses) / len(losses)

    def train(self, epochs: int, steps: int) -> forewarn.Monitor:
        optimizer = self.optimizer(self.model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        plan = forewarn.Plan.from_scheduler(scheduler, self.planned_steps) if self.planned_steps else forewarn.Plan()
        config = forewarn.Config(
            measure=forewarn.Measure(plan=plan), hyperparameters=self.hyperparameters, escalation_steps=0
        )
        monitor = forewarn.watch(self.model, optimizer, self.run, every=self.every, config=config)
        for epoch in range(epochs):
            if self.resumes_after and epoch == self.resumes_after:
                saved = monitor.state_dict()
                monitor.close("interrupted")
                monitor = forewarn.watch(self.model, optimizer, self.run, every=self.every, config=config, resume=True)
                monitor.load_state_dict(saved)
            for _ in range(steps):
                loss = loss_of(self.model, *next(self.training))
                loss.backward()
                if self.clip:
                    monitor.clip_grad_norm_(self.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                monitor.step(loss)
            if self.held_out:
                monitor.end_epoch(val_loss=self.validate())
            self.after_epoch(monitor, optimizer)
        monitor.close()
        return monitor


def _parts(inputs: Tensor, targets: Tensor, seed: int, size: int = 32) -> tuple[Batches, list[tuple[Tensor, Tensor]]]:
    (seen, unseen), (labels, held_out) = split(inputs, 0.25), split(targets, 0.25)
    return shuffled(seen, labels, seed, size), [(unseen, held_out)]


def of_kind(kind: str, seed: int, run: Path) -> Run:
    """The example models, with the learning rates at which they train well."""
    torch.manual_seed(seed)
    if kind == "gpt":
        training, unseen = split(stdlib_text(400_000))
        fixed = TokenBatches(unseen, batch_size=32, context=32, seed=0)
        model = GPT(GPTConfig(context=32, depth=2, heads=2, width=48, dropout=0.1))
        return Run(run, model, TokenBatches(training, 8, 32, seed), [next(fixed) for _ in range(4)])
    if kind == "mlp":
        made = Run(run, MLP([16, 64, 64, 5]), *_parts(*classification(2600, 16, 5, seed=seed), seed))
    elif kind == "cnn":
        made = Run(run, CNN([1, 8, 16], 4), *_parts(*images(800, 4, seed=seed), seed))
    else:
        made = Run(run, LSTMClassifier(2, 32, 3), *_parts(*sequences(1400, 12, 3, seed=seed), seed))
        made.lr = 3e-3
    return made


def healthy_epochs(kind: str, seed: int, run: Path, epochs: int = 5, steps: int = 40) -> forewarn.Monitor:
    """Warm-up and cosine over all epochs, as declared, and a resume on the way; all is measured, for all rules."""
    it = of_kind(kind, seed, run)
    it.every = 10
    it.resumes_after = epochs // 2
    it.planned_steps = total = epochs * steps
    it.rate = lambda step: min(1.0, 10 * (step + 1) / total) * (0.55 + 0.45 * math.cos(math.pi * step / total))
    it.hyperparameters = {"epochs": epochs, "total_steps": total, "dropout": 0.1 if kind == "gpt" else 0.0}
    return it.train(epochs, steps)


def classifier(run: Path, *sizes: int, size: int = 256, lr: float = 1e-3, epochs: bool = True) -> Run:
    """An MLP of these hidden sizes on the generated clusters; without epochs there is no validation either."""
    torch.manual_seed(0)
    training, held_out = _parts(*classification(2600, 16, 5, seed=0), 0, size)
    it = Run(run, MLP([16, *sizes, 5]), training, held_out if epochs else [])
    it.lr = lr
    return it


def model_without_room(run: Path) -> forewarn.Monitor:
    return classifier(run, lr=0.03, size=1024, epochs=False).train(1, 900)


def lr_that_moves_nothing(run: Path) -> forewarn.Monitor:
    return classifier(run, 64, 64, lr=1e-8, epochs=False).train(1, 600)


def lr_beyond_the_valley(run: Path) -> forewarn.Monitor:
    it = classifier(run, 64, 64, lr=2.0, epochs=False)
    it.optimizer = torch.optim.SGD
    return it.train(1, 400)


def samples_learnt_by_heart(run: Path) -> forewarn.Monitor:
    """Sixty-four samples whose labels mean nothing: all that can be learnt is the samples themselves."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(128, 16), torch.randint(5, (128,))
    it = Run(run, MLP([16, 128, 128, 5]), shuffled(inputs[:64], labels[:64], 0), [(inputs[64:], labels[64:])])
    it.hyperparameters = {"dropout": 0.0}
    return it.train(6, 20)


def fast_gains_then_none(run: Path) -> forewarn.Monitor:
    return classifier(run, 8, size=1024, lr=0.1).train(6, 20)


def model_that_had_converged_before(run: Path) -> forewarn.Monitor:
    it = classifier(run, lr=0.01)
    optimizer = torch.optim.AdamW(it.model.parameters(), lr=0.01)
    for _ in range(300):
        loss_of(it.model, *next(it.training)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return it.train(3, 60)


def validation_data_prepared_otherwise(run: Path) -> forewarn.Monitor:
    it = classifier(run, lr=0.03)

    def change(monitor: forewarn.Monitor, optimizer: torch.optim.Optimizer) -> None:
        it.held_out = [(1.5 * inputs, targets) for inputs, targets in it.held_out]

    it.after_epoch = change
    return it.train(4, 40)


def model_too_small(run: Path) -> forewarn.Monitor:
    it = classifier(run, 2, lr=1e-3)
    it.hyperparameters = {"width": 2, "epochs": 4}
    return it.train(4, 40)


def epoch_that_moves_little(run: Path) -> forewarn.Monitor:
    return classifier(run, 64, 64, lr=3e-6).train(1, 250)


def epoch_that_ruins_the_start(run: Path) -> forewarn.Monitor:
    it = classifier(run, 64, 64, lr=1.0)
    it.clip = None
    return it.train(1, 60)


def schedule_of_half_the_run(run: Path) -> forewarn.Monitor:
    it = classifier(run, 64, 64)
    it.rate = lambda step: max(0.0, 1 - step / 100)
    it.hyperparameters = {"epochs": 4, "total_steps": 200}
    return it.train(4, 50)


def validation_data_of_another_kind(run: Path) -> forewarn.Monitor:
    """A fifth of the held-out labels is wrong, so their loss is higher and still falls."""
    it = classifier(run, 64, 64)
    ((inputs, targets),) = it.held_out
    it.held_out = [(inputs, torch.where(torch.arange(len(targets)) % 5 == 0, (targets + 1) % 5, targets))]
    return it.train(2, 40)


LEARNING_FAULTS: dict[str, Callable[[Path], forewarn.Monitor]] = {
    "L104": model_without_room,
    "L105": lr_that_moves_nothing,
    "L106": lr_beyond_the_valley,
    "E101": samples_learnt_by_heart,
    "E102": fast_gains_then_none,
    "E103": model_that_had_converged_before,
    "E104": validation_data_prepared_otherwise,
    "E105": model_too_small,
    "E106": epoch_that_moves_little,
    "E107": epoch_that_ruins_the_start,
    "E108": schedule_of_half_the_run,
    "E109": validation_data_of_another_kind,
}
"""By the code of the rule that must name it first."""
