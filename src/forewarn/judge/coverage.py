"""Which rules could not judge a run because it lacks their readings, and what to log so that they can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from forewarn.judge.families import Family
from forewarn.judge.judgement import RuleSet
from forewarn.judge.registry import Rule
from forewarn.judge.rules.gradients import GradientSpike
from forewarn.judge.rules.loss import LossDivergence, LossSpike
from forewarn.judge.rules.loss_levels import LossNotStarting, LossPlateau
from forewarn.store import Run

_ALSO_NEEDED = {"G112": ("train/clip",), "U107": ("train/lr_plan",), "U108": ("train/lr",), "G102": ()}
"""By code: metrics without which a rule finds nothing, besides the first that it reads."""
_OTHERS = "layers, time, memory", "only forewarn.watch() measures them"
_GROUPS: Mapping[str, tuple[str, str]] = {
    "train/loss*": ("the training loss", "log it as `loss`"),
    "train/lr": ("the learning rate", "log it as `lr`"),
    "gradient/global_norm": ("the gradient norm", "log it as `grad_norm`, before clipping"),
    "eval/loss": ("the validation loss", "log it as `eval_loss`"),
    "evaluation/epoch": ("validation at epoch ends", "log `eval_loss` with `epoch`"),
    "evaluation/train_loss": ("validation at epoch ends", "log `eval_loss` with `epoch`"),
    "evaluation/*": ("the loss of every step", "log `loss` every step, from the first"),
}
"""By the metric that is missing: what that is, and what to do. Anything else is what no other tool logs."""
_MOST_PER_LEVEL = 32
"""Number of losses in a level, if every step was logged."""
_NOT_ABOUT_TRAINING = (Family.MONITOR, Family.METRICS)


@dataclass(frozen=True, slots=True)
class Missing:
    """Some readings that the run lacks, and the rules that need them."""

    what: str
    to_do: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class TooFew:
    """A rule whose metric was logged too rarely."""

    rule: Rule
    readings: int
    needed: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """What could be judged of a run, and what could not."""

    num_rules: int
    """Number of rules about training."""
    missing: tuple[Missing, ...]
    """Most rules first."""
    too_few: tuple[TooFew, ...]

    @property
    def num_missing(self) -> int:
        return sum(len(group.rules) for group in self.missing)


def coverage(run: Run, rule_set: RuleSet) -> Coverage:
    """Which of these rules had no readings in this run, or too few of them."""
    counts = run.num_readings()
    rules = [rule for rule in rule_set.rules if rule.family not in _NOT_ABOUT_TRAINING]
    groups: dict[tuple[str, str], list[Rule]] = {}
    for rule in rules:
        if lacking := _lacking(rule, counts):
            what, to_do = next((words for name, words in _GROUPS.items() if fnmatchcase(lacking, name)), _OTHERS)
            groups.setdefault((what, to_do), []).append(rule)
    by_size = sorted(groups.items(), key=lambda item: -len(item[1]))
    return Coverage(
        len(rules),
        tuple(Missing(what, to_do, tuple(members)) for (what, to_do), members in by_size),
        tuple(_too_few(rules, counts, rule_set)),
    )


def _lacking(rule: Rule, counts: Mapping[str, int]) -> str:
    """A metric that a rule needs and the run lacks; empty if it has all."""
    needed = (rule.reads[0], *_ALSO_NEEDED.get(rule.code, ()))
    return next((metric for metric in needed if metric not in counts and "*" not in metric), "")


def _too_few(rules: list[Rule], counts: Mapping[str, int], rule_set: RuleSet) -> list[TooFew]:
    """The rules that compare many readings, where the run has fewer."""
    settings = rule_set.settings_of
    needed = {
        "L102": ("train/loss", settings(LossSpike).minimum + 1),
        "L103": ("train/loss", 4 * settings(LossDivergence).window),
        "L104": ("train/loss_level", 2 * settings(LossPlateau).levels),
        "L105": ("train/loss_level", settings(LossNotStarting).levels + 1),
        "G104": ("gradient/global_norm", settings(GradientSpike).minimum + 1),
    }
    per_level = counts.get("train/loss", 0) / max(1, counts.get("train/loss_level", 0) - 1)
    per_level = min(max(1.0, per_level), _MOST_PER_LEVEL)
    too_few = []
    for rule in rules:
        metric, least = needed.get(rule.code, ("", 0))
        if 0 < counts.get(metric, 0) < least:
            if metric == "train/loss_level":  # in losses, as people count
                too_few.append(TooFew(rule, counts.get("train/loss", 0), round(per_level * least)))
            else:
                too_few.append(TooFew(rule, counts[metric], least))
    return too_few
