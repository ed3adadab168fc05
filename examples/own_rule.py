"""A rule of your own: it fires like the built-in ones, live and when the run is judged again.

python examples/own_rule.py
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import forewarn
from forewarn import Finding, Message, Series, Settings, Severity, advise, between, finding, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class LowAccuracy(Settings):
    least: float = between(0.5, 0.0, 1.0)
    """The lowest accuracy that is expected after the first evaluations."""


@rule("Z102", "low-accuracy", reads=("classifier/accuracy",), settings=LowAccuracy,
      message=Message("The classifier hardly does better than chance", "accuracy {value} · expected {bound}"),
      remedies=(advise("check_labels", "Compare ten inputs with their labels by hand",
                       "labels out of step with their inputs teach nothing"),))  # fmt: skip
def low_accuracy(accuracy: Series, settings: LowAccuracy) -> Finding | None:
    """The accuracy is below what even a small model reaches.

    ## Why is this bad?
    The model learns nothing that helps, whatever its loss says.

    ## Example
    fires: 0.3x6
    quiet: 0.3 0.5 0.7 0.8 0.8 0.9
    """
    recent = accuracy.median(window=3)
    if len(accuracy) < 5 or recent >= settings.least:
        return None
    return finding(Severity.WARNING, recent, settings.least)


def main(run: str | Path = "runs/own_rule", steps: int = 200) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 8)
    targets = torch.randint(4, (256,))  # drawn without a look at the inputs: there is nothing to learn
    with forewarn.watch(model, optimizer, run=run, rules=[low_accuracy]) as monitor:
        for step in range(steps):
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                monitor.log("classifier/accuracy", (outputs.argmax(1) == targets).float().mean().item())
            monitor.step(loss)


if __name__ == "__main__":
    main()
