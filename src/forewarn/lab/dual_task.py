"""A model with two tasks: an LSTM that locates a burst in a sequence and classifies it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from forewarn.attach import watch
from forewarn.lab.data import split
from forewarn.lab.results import delete_results, free_results
from forewarn.lab.snapshots import Snapshots
from forewarn.monitor import Monitor
from forewarn.types import AlertState, Outcome
from forewarn.views.task_lines import TaskView

CLIP = 1.0
"""Global gradient norm to clip at, because some batches give an LSTM large gradients."""
MEASURE_EVERY = 10
"""Number of steps between measurements of all tensors."""
KEPT_SNAPSHOTS = 3


class Prediction(NamedTuple):
    """The most likely type of each sequence, and the steps at which the burst starts and ends."""

    types: Tensor
    starts: Tensor | None
    """None if the model predicts no pointers."""
    ends: Tensor | None


class Epoch(NamedTuple):
    """The losses and accuracy of one epoch."""

    loss: float
    """The mean of the weighted sum over its batches."""
    held_out: dict[str, float]
    """The loss of each task on held-out data, and the accuracy of the types."""


class _Data(NamedTuple):
    sequences: Tensor
    types: Tensor
    pointers: Tensor | None
    """Standardized start and end, `[samples, 2]`."""

    def part(self, indices: Tensor) -> _Data:
        return _Data(
            self.sequences[indices], self.types[indices], None if self.pointers is None else self.pointers[indices]
        )


class DualTaskLSTM(nn.Module):
    """An LSTM with two heads on its last state: `type` (classification) and `pointer` (regression of start and end)."""

    pointer_mean: Tensor
    """Mean start and end in the training data."""
    pointer_std: Tensor

    def __init__(
        self, num_features: int = 1, num_types: int = 3, width: int = 32, depth: int = 1, predict_pointers: bool = True
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, width, num_layers=depth, batch_first=True)
        self.type_head = nn.Linear(width, num_types)
        self.pointer_head = nn.Linear(width, 2) if predict_pointers else None
        self.register_buffer("pointer_mean", torch.zeros(2))
        self.register_buffer("pointer_std", torch.ones(2))
        self.epochs: list[Epoch] = []
        """The results of each epoch of `fit`."""
        self.monitor: Monitor | None = None
        """The monitor of the last `fit` with `monitor_gradients=True`, closed."""

    def forward(self, sequences: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits `[batch, num_types]` and standardized pointers `[batch, 2]` of `[batch, length, features]`."""
        states, _ = self.lstm(sequences)
        last = states[:, -1]
        return self.type_head(last), None if self.pointer_head is None else self.pointer_head(last)

    def fit(
        self,
        X: Any,  # noqa: N803 - the names that people know from scikit-learn
        y: Any,
        expansion_start: Any = None,
        expansion_end: Any = None,
        *,
        epochs: int = 20,
        batch_size: int = 64,
        lr: float = 5e-3,
        validation_share: float = 0.2,
        task_weights: Mapping[str, float] | None = None,
        balance: str | None = None,
        device: str = "cpu",
        seed: int = 0,
        monitor_gradients: bool = False,
        gradient_log_freq: int = 10,
        result_dir: str | Path = "results/multitask",
        overwrite: bool = False,
        view: TaskView | None = None,
    ) -> Self:
        """Learn the types `y` of sequences `X`, and where the expansion in each starts and ends, if that is given.

        With `monitor_gradients` the run is watched: the tasks are compared every 10 steps, the gradients are shown on
        every `gradient_log_freq`-th epoch, readings and alerts go to `result_dir/run`, and when a task collapses a
        snapshot goes to `result_dir/snapshots`. If `result_dir` holds an earlier run, `overwrite` deletes it; otherwise
        the results go beside it, such as to `result_dir-2`. `balance` needs `monitor_gradients`, from which it learns.
        """
        if balance is not None and not monitor_gradients:
            raise ValueError("balance learns from the monitored gradients: give monitor_gradients=True as well")
        data = self._prepared(X, y, expansion_start, expansion_end, device)
        training, held_out = (data.part(part) for part in split(torch.arange(len(data.types)), validation_share))
        optimizer = AdamW(self.parameters(), lr=lr)
        view = view or TaskView(epochs, gradient_log_freq)
        self.epochs, self.monitor = [], None
        directory = Path(result_dir)
        if monitor_gradients:
            if overwrite:
                delete_results(directory)
            directory = free_results(directory)
            self.monitor = watch(self, optimizer, directory / "run", every=MEASURE_EVERY, views=[view])
        saver = Snapshots(directory / "snapshots", KEPT_SNAPSHOTS)
        generator = torch.Generator().manual_seed(seed)
        try:
            for epoch in range(1, epochs + 1):
                self.train()
                losses = []
                for batch in _batches(training, batch_size, generator):
                    loss = self._sum(self._losses(batch), task_weights, balance)
                    loss.backward()
                    outcome = self._update(optimizer, loss)
                    if any(
                        alert.name == "task-collapse" and alert.state is AlertState.FIRING for alert in outcome.alerts
                    ):
                        self._save(saver, optimizer, view)
                    losses.append(loss.detach())
                self.epochs.append(Epoch(float(torch.stack(losses).mean()), self._evaluated(held_out)))
                self._log_evaluation()
                view.end_epoch(epoch, *self.epochs[-1])
        finally:
            if self.monitor is not None:
                self.monitor.close("completed" if len(self.epochs) == epochs else "interrupted")
        return self

    @torch.no_grad()
    def predict(self, X: Any) -> Prediction:  # noqa: N803
        """Types and, if they were learned, starts and ends in steps."""
        self.eval()
        logits, pointers = self(_sequences(X).to(self.pointer_mean.device))
        if pointers is None:
            return Prediction(logits.argmax(dim=1), None, None)
        starts, ends = (pointers * self.pointer_std + self.pointer_mean).unbind(dim=1)
        return Prediction(logits.argmax(dim=1), starts, ends)

    def _prepared(self, X: Any, y: Any, start: Any, end: Any, device: str) -> _Data:  # noqa: N803
        """The data as tensors on the device. Pointers are standardized, so chance is a loss of one half."""
        sequences, types = _sequences(X), torch.as_tensor(y).long()
        if len(sequences) != len(types):
            raise ValueError(f"X has {len(sequences)} sequences and y {len(types)} types; there must be one for each")
        if (start is None) != (end is None):
            raise ValueError("expansion_start and expansion_end belong together: give both or neither")
        if self.pointer_head is not None and start is None:
            raise ValueError("this model predicts pointers: give expansion_start and expansion_end, or make it with "
                             "predict_pointers=False")  # fmt: skip
        pointers = None
        if self.pointer_head is not None:
            raw = torch.stack([torch.as_tensor(start).float(), torch.as_tensor(end).float()], dim=1)
            if len(raw) != len(sequences):
                raise ValueError(f"X has {len(sequences)} sequences, but there are {len(raw)} starts and ends")
            self.pointer_mean.copy_(raw.mean(dim=0))
            self.pointer_std.copy_(raw.std(dim=0).clamp(min=1e-6))
            pointers = ((raw - raw.mean(dim=0)) / raw.std(dim=0).clamp(min=1e-6)).to(device)
        self.to(device)
        return _Data(sequences.to(device), types.to(device), pointers)

    def _losses(self, batch: _Data) -> dict[str, Tensor]:
        logits, pointers = self(batch.sequences)
        losses = {}
        if pointers is not None and batch.pointers is not None:
            losses["pointer"] = 0.5 * functional.mse_loss(pointers, batch.pointers)  # as in a Gaussian likelihood
        losses["type"] = functional.cross_entropy(logits, batch.types)
        return losses

    def _sum(self, losses: Mapping[str, Tensor], weights: Mapping[str, float] | None, balance: str | None) -> Tensor:
        if self.monitor is not None:
            return self.monitor.combine_losses(losses, weights=weights, balance=balance)
        return torch.stack([(weights or {}).get(name, 1.0) * loss for name, loss in losses.items()]).sum()

    def _update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> Outcome:
        if self.monitor is None:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)
        else:
            self.monitor.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return Outcome() if self.monitor is None else self.monitor.step(loss)

    @torch.no_grad()
    def _evaluated(self, held_out: _Data) -> dict[str, float]:
        self.eval()
        numbers = {name: float(loss) for name, loss in self._losses(held_out).items()}
        logits, _ = self(held_out.sequences)
        return {**numbers, "accuracy": float((logits.argmax(dim=1) == held_out.types).float().mean())}

    def _log_evaluation(self) -> None:
        if self.monitor is not None:
            for name, value in self.epochs[-1].held_out.items():
                metric, scope = ("eval/accuracy", "") if name == "accuracy" else ("eval/task_loss", name)
                self.monitor.log(metric, value, scope, completed=True)

    def _save(self, saver: Snapshots, optimizer: torch.optim.Optimizer, view: TaskView) -> None:
        assert self.monitor is not None
        state = {
            "step": self.monitor.at,
            "model": self.state_dict(),
            "optimizer": optimizer.state_dict(),
            "monitor": self.monitor.state_dict(),
        }
        path = saver.save(self.monitor.at, state)
        if path is not None:
            view.note(f"snapshot: {path}", style="dim")


def _sequences(X: Any) -> Tensor:  # noqa: N803
    """Sequences `[samples, length, features]`; with one feature, its dimension may be left out."""
    sequences = torch.as_tensor(X).float()
    if sequences.ndim == 2:
        sequences = sequences.unsqueeze(-1)
    if sequences.ndim != 3:
        raise ValueError(f"X must be [samples, length] or [samples, length, features], not {tuple(sequences.shape)}")
    return sequences


def _batches(data: _Data, size: int, generator: torch.Generator) -> Iterator[_Data]:
    """All samples once, in random order."""
    for indices in torch.randperm(len(data.types), generator=generator).split(size):
        yield data.part(indices.to(data.types.device))
