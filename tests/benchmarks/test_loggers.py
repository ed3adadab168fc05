import numpy as np
import pytest
import torch

from benchmarks.overhead.loggers import OptimizerMetrics
from forewarn.lab.bench.contender import Loop, Turn


class Remembering(OptimizerMetrics):
    """Also keeps the weights from before the step and the gradients."""

    def clip(self) -> None:
        super().clip()
        self.before = {name: weight.detach().clone() for name, weight in self.training.model.named_parameters()}
        self.gradients = {name: weight.grad.numpy().copy() for name, weight in self.training.model.named_parameters()}

    def after_step(self, loss) -> None:
        super().after_step(loss)
        self.after = {name: weight.detach().clone() for name, weight in self.training.model.named_parameters()}


def test_optimizer_metrics_are_what_the_optimizer_did(small_workload, tmp_path):
    contender = Remembering()
    with Loop(small_workload, contender, Turn(tmp_path, 3)) as loop:
        for _ in range(4):
            loop.fetch()
            loop.step()
    for name, gradient in contender.gradients.items():
        assert contender.latest[f"l2_norm/grad/{name}"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        moved = torch.dist(contender.after[name], contender.before[name]).item()
        assert contender.latest[f"l2_norm/update/{name}"] == pytest.approx(moved, rel=1e-3)
        assert -1 <= contender.latest[f"cosine/moment_grad/{name}"] <= 1
    every = np.concatenate([gradient.ravel() for gradient in contender.gradients.values()])
    assert contender.latest["l2_norm/grad/global"] == pytest.approx(np.linalg.norm(every), rel=1e-5)
