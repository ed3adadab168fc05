"""Logging as people write it by hand: statistics of each tensor by `.item()`, histograms, optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from forewarn.lab.bench.contender import Contender, Turn
from forewarn.lab.bench.workloads import Training


class TensorBoardScalars(Contender):
    """Four scalars per tensor, each fetched on its own."""

    name = "tensorboard-scalars"
    description = "norm, mean and std of each gradient and the norm of each weight, by .item() into add_scalar"
    package = "tensorboard"
    install = "tensorboard"

    def attach(self, training: Training, turn: Turn) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().attach(training, turn)
        self.writer: Any = SummaryWriter(str(turn.directory))
        self.step = 0

    def after_backward(self, loss: Tensor) -> None:
        self.writer.add_scalar("loss", loss.item(), self.step)
        for name, parameter in self.training.model.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad
            self.writer.add_scalar(f"gradient_norm/{name}", gradient.norm().item(), self.step)
            self.writer.add_scalar(f"gradient_mean/{name}", gradient.mean().item(), self.step)
            self.writer.add_scalar(f"gradient_std/{name}", gradient.std().item(), self.step)
            self.writer.add_scalar(f"weight_norm/{name}", parameter.detach().norm().item(), self.step)
        self.step += 1

    def close(self) -> None:
        self.writer.close()


class TensorBoardHistograms(Contender):
    """One histogram per tensor."""

    name = "tensorboard-histograms"
    description = "a histogram of each gradient by add_histogram"
    package = "tensorboard"
    install = "tensorboard"

    def attach(self, training: Training, turn: Turn) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().attach(training, turn)
        self.writer: Any = SummaryWriter(str(turn.directory))
        self.step = 0

    def after_backward(self, loss: Tensor) -> None:
        self.writer.add_scalar("loss", loss.item(), self.step)
        for name, parameter in self.training.model.named_parameters():
            if parameter.grad is not None:
                self.writer.add_histogram(f"gradient/{name}", parameter.grad, self.step)
        self.step += 1

    def close(self) -> None:
        self.writer.close()


class OptimizerMetrics(Contender):
    """The per-parameter metrics of Composer's optimizer monitor, implemented from its documentation."""

    name = "optimizer-metrics"
    description = (
        "as Composer's optimizer monitor: norms of gradient, moment, root of the second moment and update, cosine of "
        "moment and gradient, per tensor by .item(), kept in a dict"
    )

    def after_step(self, loss: Tensor) -> None:
        metrics: dict[str, float] = {"loss": loss.item()}
        names = {parameter: name for name, parameter in self.training.model.named_parameters()}
        total = torch.zeros(())
        for group in self.training.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.training.optimizer.state[parameter]
                if parameter.grad is None or not state:
                    continue
                gradient, name = parameter.grad, names[parameter]
                total += gradient.norm() ** 2
                for quantity, value in _quantities(parameter.detach(), gradient, group, state).items():
                    metrics[f"{quantity}/{name}"] = value.item()
        metrics["l2_norm/grad/global"] = total.sqrt().item()
        self.latest = metrics


def _quantities(weight: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Tensor]:
    """Norms of AdamW's state and update; the update is recomputed from the state."""
    moment, second, steps = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
    first_decay, second_decay = group["betas"]
    root = second.sqrt()
    scale = root / (1 - second_decay**steps) ** 0.5 + group["eps"]
    update = group["lr"] * (moment / (1 - first_decay**steps) / scale + group["weight_decay"] * weight)
    return {
        "l2_norm/grad": gradient.norm(),
        "l2_norm/moment": moment.norm(),
        "l2_norm/second_moment_sqrt": root.norm(),
        "l2_norm/update": update.norm(),
        "cosine/moment_grad": cosine_similarity(moment.flatten(), gradient.flatten(), dim=0),
    }
