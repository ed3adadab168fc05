"""What comparing several tasks costs: on a step that compares them, on the steps between, and on average.

    python benchmarks/tasks.py

A GPT of 6 and of 12 blocks with an auxiliary head on its last hidden state, and the LSTM of `forewarn train multitask`.
The same training runs without `monitor.combine_losses`, with it but never comparing, and comparing on every step; a
fourth variant only makes the two passes by `torch.autograd.grad`. The variants take turns step by step in one process
on one thread; figures are medians of the differences of CPU time within a round, over the median step without tasks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import forewarn
from forewarn.act.task_losses import EVERY
from forewarn.lab.dual_task import DualTaskLSTM
from forewarn.lab.gpt import GPT, GPTConfig, token_loss

ROUNDS = 40
WARM_UP_ROUNDS = 12
"""The first ten steps of a run are measured in detail, whatever the schedule says."""
NEVER = 10**9

Losses = dict[str, Tensor]


class TwoHeads(nn.Module):
    """A GPT that also classifies the whole sequence from its last hidden state."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(vocab_size=256, context=64, depth=depth, heads=4, width=128))
        self.classes = nn.Linear(128, 10)
        self.gpt.head.register_forward_pre_hook(self._keep)
        self.tokens = torch.randint(256, (8, 65))
        self.labels = torch.randint(10, (8,))

    def _keep(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self.hidden = args[0]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.gpt(tokens), self.classes(self.hidden.mean(dim=1))

    def losses(self) -> Losses:
        logits, classes = self(self.tokens[:, :-1])
        return {
            "language": token_loss(logits, self.tokens[:, 1:]),
            "class": functional.cross_entropy(classes, self.labels),
        }

    def last_shared(self) -> list[nn.Parameter]:
        return list(self.gpt.blocks[-1].get_submodule("mlp.output").parameters())


class Recurrent(DualTaskLSTM):
    """The example of `forewarn train multitask`: its two heads share only the LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences, self.types, self.where = torch.randn(64, 60, 1), torch.randint(3, (64,)), torch.randn(64, 2)

    def losses(self) -> Losses:
        logits, pointers = self(self.sequences)
        return {
            "pointer": functional.mse_loss(pointers, self.where),
            "type": functional.cross_entropy(logits, self.types),
        }

    def last_shared(self) -> list[nn.Parameter]:
        return list(self.lstm.parameters())


class Training:
    """One model that trains on the sum of two losses."""

    def __init__(self, model: Callable[[], TwoHeads | Recurrent], folder: str, every: int = 0, by_hand: bool = False):
        torch.manual_seed(0)
        self.model = model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.monitor = forewarn.watch(
            self.model, self.optimizer, f"{folder}/{every}{by_hand}", every=NEVER, views=[],
            config=forewarn.Config(escalation_steps=0),  # an alert about random tasks must not turn the schedule dense
        )  # fmt: skip
        self.every = every
        self.by_hand = by_hand

    def step(self) -> None:
        losses = self.model.losses()
        if self.by_hand:
            shared = self.model.last_shared()
            for loss in losses.values():
                torch.autograd.grad(loss, shared, retain_graph=True)
        loss = (
            self.monitor.combine_losses(losses, every=self.every)
            if self.every
            else sum(losses.values(), torch.zeros(()))
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.monitor.step(loss)


def shares(model: Callable[[], TwoHeads | Recurrent]) -> tuple[float, dict[str, float]]:
    """Seconds of a step without tasks, and what each variant adds as a share of it."""
    with tempfile.TemporaryDirectory() as folder:
        variants = {
            "none": Training(model, folder),
            "between": Training(model, folder, NEVER),
            "comparing": Training(model, folder, 1),
            "passes alone": Training(model, folder, by_hand=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(ROUNDS + WARM_UP_ROUNDS):
            for name, training in variants.items():
                begin = time.process_time()
                training.step()
                if number >= WARM_UP_ROUNDS:
                    seconds[name].append(time.process_time() - begin)
        for training in variants.values():
            training.monitor.close()
    step = statistics.median(seconds["none"])
    added = {
        name: statistics.median(one - none for one, none in zip(times, seconds["none"], strict=True)) / step
        for name, times in seconds.items()
    }
    return step, added


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':24}{'ms a step':>10}{'comparing':>11}{'its passes':>12}{'between':>9}{f'every {EVERY}':>10}")
    workloads: dict[str, Callable[[], TwoHeads | Recurrent]] = {
        "GPT of 6 blocks": lambda: TwoHeads(6), "GPT of 12 blocks": lambda: TwoHeads(12), "LSTM": Recurrent,
    }  # fmt: skip
    for name, model in workloads.items():
        step, added = shares(model)
        mean = added["between"] + (added["comparing"] - added["between"]) / EVERY
        figures = (added["comparing"], added["passes alone"], added["between"], mean)
        columns = (f"{figure:{width}.1%}" for figure, width in zip(figures, (11, 12, 9, 10), strict=True))
        print(f"{name:24}{1e3 * step:10.1f}" + "".join(columns))


if __name__ == "__main__":
    main()
