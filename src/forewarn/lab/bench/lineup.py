"""Who takes part: every contender there is, and the choice among them."""

from __future__ import annotations

from forewarn.lab.bench.contender import BareAgain, Contender
from forewarn.lab.bench.loggers import OptimizerMetrics, TensorBoardHistograms, TensorBoardScalars
from forewarn.lab.bench.packages import Pulsegrad, TorchModuleMonitor, Torchmortem, Trainscope, Wandb
from forewarn.lab.bench.tiers import tiers


def all_contenders() -> list[Contender]:
    """Every contender, made anew; the bare loop comes first."""
    return [
        Contender(), BareAgain(), *tiers(), TorchModuleMonitor(), Wandb(), TensorBoardScalars(),
        TensorBoardHistograms(), OptimizerMetrics(), Torchmortem(), Trainscope(), Pulsegrad(),
    ]  # fmt: skip


def chosen(names: str) -> list[Contender]:
    """The contenders named in a list with commas; `forewarn` and `all` are groups. The bare loop is always there."""
    every = all_contenders()
    known = [contender.name for contender in every]
    groups = {"all": known, "forewarn": ["bare-again", *(name for name in known if name.startswith("forewarn-"))]}
    wanted: set[str] = {known[0]}
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in groups and name not in known:
            raise ValueError(f"there is no contender {name!r}; there are all, forewarn, {', '.join(known)}")
        wanted |= set(groups.get(name, [name]))
    return [contender for contender in every if contender.name in wanted]
