"""All settings in one tree, each field with its own docstring; loads from TOML.

The bounds of a rule stand above it in its own file; those of `loss-spike` are `thresholds.loss_spike` here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

from forewarn.judge import rules
from forewarn.judge.judgement import RuleSet
from forewarn.judge.registry import Rule, all_rules, enabled_rules
from forewarn.judge.rules.activations import ActivationThresholds
from forewarn.judge.rules.attention import AttentionThresholds
from forewarn.judge.rules.epoch_schedule import EpochScheduleThresholds
from forewarn.judge.rules.evaluation import EvaluationThresholds
from forewarn.judge.rules.first_epoch import FirstEpochThresholds
from forewarn.judge.rules.frozen import FrozenThresholds
from forewarn.judge.rules.gain import GainThresholds
from forewarn.judge.rules.gradients import GradientThresholds
from forewarn.judge.rules.logits import LogitThresholds
from forewarn.judge.rules.loss import LossThresholds
from forewarn.judge.rules.loss_levels import LossLevelThresholds
from forewarn.judge.rules.lr import LrThresholds
from forewarn.judge.rules.module_metrics import ModuleMetricThresholds
from forewarn.judge.rules.router import RouterThresholds
from forewarn.judge.rules.tasks import TaskThresholds
from forewarn.judge.rules.updates import UpdateThresholds
from forewarn.judge.rules.weights import WeightThresholds
from forewarn.measure.options import Measure
from forewarn.settings import Settings, between


@dataclass(frozen=True, kw_only=True)
class Thresholds(
    ModuleMetricThresholds, RouterThresholds, LogitThresholds, AttentionThresholds, ActivationThresholds,
    TaskThresholds, EpochScheduleThresholds, FirstEpochThresholds, EvaluationThresholds, WeightThresholds,
    LrThresholds, UpdateThresholds, FrozenThresholds, GainThresholds, GradientThresholds, LossLevelThresholds,
    LossThresholds,
):  # fmt: skip  # the fields of the last base come first
    """Every bound that a rule compares with, by the rule's name; each file of rules has its own part."""


def check_tables(rules: Iterable[Rule], thresholds: type[Settings]) -> None:
    """A ValueError unless the settings of each of these rules are a table of `thresholds`, under the rule's name."""
    tables = get_type_hints(thresholds)
    wanted = {rule.table: rule for rule in rules if rule.settings is not None}
    for table, rule in wanted.items():
        assert rule.settings is not None
        kind = rule.settings.__name__
        if table not in tables:
            raise ValueError(
                f"the settings of {rule.code} {rule.name} are in no table of thresholds: add `{table}: {kind} = "
                f"{kind}()` to the class at the end of its file, and that class to the bases of {thresholds.__name__}"
            )
        if tables[table] is not rule.settings:
            raise ValueError(f"thresholds.{table} is {tables[table].__name__}, but {rule.code} {rule.name} has {kind}")
    if left := tables.keys() - wanted.keys():
        raise ValueError(f"thresholds.{min(left)} belongs to no rule; a table is named like its rule")


check_tables((rule for rule in all_rules() if rule.check.__module__.startswith(f"{rules.__name__}.")), Thresholds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing(Settings):
    """How `monitor.combine_losses(balance=…)` moves the weights of the tasks."""

    rate: float = between(0.05, 0.0, 1.0)
    """Share of the way that a weight goes in one update, on a log scale."""
    asymmetry: float = between(0.12, 0.0, 3.0)
    """GradNorm's alpha: how much harder a task that is behind may pull; the paper's value for real images is 0.12."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Settings):
    """Everything that can be set about a monitor beyond the arguments of `watch`."""

    measure: Measure = Measure()
    """What is read from the training loop; a stored run keeps it, whatever it is judged by later."""
    history_window: int = between(1024, 64)
    """Values kept in memory per metric of the run as a whole."""
    detail_window: int = between(64, 16)
    """Checks kept in memory per metric of each tensor that a rule looks at, about 5 bytes each, and of what sums all of
    them up."""
    escalation_steps: int = between(20, 0)
    """For so many steps after a warning fires, every step is measured in detail."""
    early_stopping_patience: int = between(0, 0)
    """Calls of `end_epoch` in a row without a better validation loss after which `should_stop` is set; 0 for never."""
    early_stopping_min_delta: float = between(0.0, 0.0)
    """By how much a validation loss must be lower to be better."""
    disable: Sequence[str] = ()
    """Rules that are not judged, by code or by name."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """What you declare about the run (dropout, total steps, batch size); remedies use it for their numbers."""
    balancing: Balancing = Balancing()
    """How automatic loss weights move; used only where `monitor.combine_losses(balance=…)` asks for them."""
    thresholds: Thresholds = Thresholds()

    @classmethod
    def of(cls, config: Config | Mapping[str, Any] | str | Path | None) -> Config:
        """What `watch(config=…)` accepts: a Config, a dict of settings, the path of a TOML file, or None."""
        if config is None or isinstance(config, Config):
            return config or cls()
        if isinstance(config, Mapping):
            return cls.from_dict(config)
        if isinstance(config, str | Path):
            return cls.load(config)
        raise TypeError(
            f"config must be a forewarn.Config, a dict of settings or the path of a TOML file, not {config!r}"
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A config from a TOML file, its keys named like the fields here."""
        return cls.from_dict(read_toml(path))

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {field.name: f"measure.{field.name}" for field in fields(Measure)}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """The config of a stored run; what this version no longer has is left out, so that it can still be judged."""
        tables = stored.get("thresholds", {})
        sources = [(stored, cls), *((tables.get(name, {}), kind) for name, kind in get_type_hints(Thresholds).items())]
        measure = {
            place.removeprefix("measure."): plain[name]
            for plain, kind in sources
            for name, place in kind._moved().items()
            if name in plain
        }
        measure |= stored.get("measure", {})
        return cls.from_dict(_common({**stored, "measure": measure}, cls().to_dict()))

    @classmethod
    def for_stored(cls, plain: Mapping[str, Any], stored: Mapping[str, Any]) -> Self:
        """These settings for the run whose config is stored: what is fixed about a run is the run's own.

        To name another value for it is a ValueError.
        """
        wanted, own = cls.from_dict(plain), cls.from_stored(stored)
        for table in ("measure", "hyperparameters"):
            before, after = (dict(_leaves(config.to_dict()[table])) for config in (own, wanted))
            for name, _ in _leaves(plain.get(table, {})):
                if after[name] != before.get(name):
                    was = f"with {before[name]!r}" if name in before else "without it"
                    raise ValueError(
                        f"[{table}] {name} = {after[name]!r} cannot be changed afterwards: the run was measured {was}; "
                        "leave it out"
                    )
        return replace(wanted, measure=own.measure, hyperparameters=own.hyperparameters)

    def rule_set(self) -> RuleSet:
        """What a run with this config is judged by; an unknown rule in `disable` is a ValueError.

        A rule of the user's own has no table here, and is judged by the defaults of its settings.
        """
        settings = {
            rule.code: getattr(self.thresholds, rule.table, None) or rule.settings()
            for rule in all_rules()
            if rule.settings is not None
        }
        return RuleSet(enabled_rules(self.disable), settings, self.history_window, self.detail_window)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file as they stand there."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _common(stored: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings that are present in this version too."""
    return {
        name: _common(value, present[name]) if isinstance(value, Mapping) and present[name] else value
        for name, value in stored.items()
        if name in present
    }


def _leaves(plain: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is no table, by the names of the tables around it and its own."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value
