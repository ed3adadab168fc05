"""A probe of your own: what it reads is recorded, combined over ranks and judged like everything else.

python examples/own_probe.py

The probe reads the effective rank of each weight matrix, on the steps that are measured in detail.
"""

from pathlib import Path

import torch
from torch import nn

import forewarn
from forewarn import Cadence, Metric, Pending, Probe, Reading, Reduce, Scope, Step

RANK = Metric("matrix/effective_rank", Scope.PARAMETER, Cadence.MEASURED, "dimensions", Reduce.MEAN,
              "Number of directions in which a weight matrix acts, by the entropy of its singular values.")  # fmt: skip


class EffectiveRank(Probe):
    """The effective rank of every weight matrix of a model."""

    name = "effective_rank"
    metrics = (RANK,)

    def __init__(self, model: nn.Module) -> None:
        self.matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}

    def collect(self, step: Step) -> Pending:
        if not step.measured:
            return Pending()
        values = []
        with torch.no_grad():
            for weight in self.matrices.values():
                share = torch.linalg.svdvals(weight)
                share = share / share.sum()
                values.append(torch.special.entr(share).sum().exp())
        scopes = tuple(self.matrices)
        # The values stay where they are. All probes share one transfer to the host.
        return Pending([torch.stack(values)], lambda arrays: [Reading(RANK.name, scopes, arrays[0])])


def main(run: str | Path = "runs/own_probe", steps: int = 200) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with forewarn.watch(model, optimizer, run=run, every=20, probes=[EffectiveRank(model)]) as monitor:
        for _ in range(steps):
            inputs = torch.randn(64, 16)
            loss = (model(inputs) - inputs[:, :1]).square().mean()  # only one direction of the input matters
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    with forewarn.open_run(monitor.path) as stored:
        for name in ("0.weight", "2.weight"):
            ranks = stored.series("matrix/effective_rank", name).values
            print(f"{name}: effective rank {ranks[0]:.1f} at the start, {ranks[-1]:.1f} at the end")


if __name__ == "__main__":
    main()
