"""All settings in one tree, each field with its own docstring; loads from TOML.

The thresholds of a rule are declared above it in its file. Those of `loss-spike` are `thresholds.loss_spike` here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self, cast, get_type_hints

from forewarn.codec import check_depth
from forewarn.files import read_regular
from forewarn.judge.judgement import RuleSet
from forewarn.judge.own_rules import own_rules
from forewarn.judge.registry import Rule
from forewarn.judge.rules import all_rules, find_rule, is_rule
from forewarn.judge.rules.activations import ActivationThresholds
from forewarn.judge.rules.anomaly import CODE as ANOMALY
from forewarn.judge.rules.anomaly import Anomaly, AnomalyThresholds
from forewarn.judge.rules.attention import AttentionThresholds
from forewarn.judge.rules.batch import BatchThresholds
from forewarn.judge.rules.epoch_schedule import EpochScheduleThresholds
from forewarn.judge.rules.epsilon import EpsilonThresholds
from forewarn.judge.rules.evaluation import EvaluationThresholds
from forewarn.judge.rules.first_epoch import FirstEpochThresholds
from forewarn.judge.rules.frozen import FrozenThresholds
from forewarn.judge.rules.gain import GainThresholds
from forewarn.judge.rules.gradients import GradientThresholds
from forewarn.judge.rules.initial_scale import InitialScaleThresholds
from forewarn.judge.rules.logits import LogitThresholds
from forewarn.judge.rules.loss import LossThresholds
from forewarn.judge.rules.loss_direction import LossDirectionThresholds
from forewarn.judge.rules.loss_levels import LossLevelThresholds
from forewarn.judge.rules.loss_shift import LossShiftThresholds
from forewarn.judge.rules.lr import LrThresholds
from forewarn.judge.rules.module_metrics import ModuleMetricThresholds
from forewarn.judge.rules.outside_steps import OutsideStepThresholds
from forewarn.judge.rules.players import PlayersThresholds
from forewarn.judge.rules.rank_comparison import RankThresholds
from forewarn.judge.rules.router import RouterThresholds
from forewarn.judge.rules.speed import SpeedThresholds
from forewarn.judge.rules.tasks import TaskThresholds
from forewarn.judge.rules.updates import UpdateThresholds
from forewarn.judge.rules.weights import WeightThresholds
from forewarn.measure.options import Measure
from forewarn.metrics import switched_off
from forewarn.policy import Policy
from forewarn.settings import Settings, between, secret

_MOST_BYTES = 1 << 20
_MOST_KEY_PARTS = 64
"""Maximum number of parts in a key such as a.b.c: the time of tomllib grows with its square."""
_QUOTED = re.compile(r"""\"(?:[^"\\\n]|\\.)*\"|'[^'\n]*'""")
_KEY_PART = re.compile(r"[\w \t-]+")


@dataclass(frozen=True, kw_only=True)
class Thresholds(
    RankThresholds, AnomalyThresholds, ModuleMetricThresholds, RouterThresholds, LogitThresholds, AttentionThresholds,
    ActivationThresholds, TaskThresholds, SpeedThresholds, EpochScheduleThresholds, FirstEpochThresholds,
    EvaluationThresholds, InitialScaleThresholds, WeightThresholds, PlayersThresholds, OutsideStepThresholds,
    LrThresholds, EpsilonThresholds, UpdateThresholds, FrozenThresholds, GainThresholds, GradientThresholds,
    LossShiftThresholds, LossLevelThresholds, LossThresholds, LossDirectionThresholds, BatchThresholds,
):  # fmt: skip  # the fields of the last base come first
    """The thresholds of every rule, by the rule's name; each file of rules declares its own."""


def check_tables(rules: Iterable[Rule], thresholds: type[Settings]) -> None:
    """Raise ValueError unless each rule's settings are a table of `thresholds`, under the rule's name."""
    tables = get_type_hints(thresholds)
    by_table = {rule.table: rule for rule in rules if rule.settings is not None}
    for table, rule in by_table.items():
        assert rule.settings is not None
        kind = rule.settings.__name__
        if table not in tables:
            raise ValueError(
                f"the settings of {rule.code} {rule.name} have no table of thresholds: add `{table}: {kind} = "
                f"{kind}()` to the class at the end of its file, and that class to the bases of {thresholds.__name__}"
            )
        if tables[table] is not rule.settings:
            raise ValueError(f"thresholds.{table} is {tables[table].__name__}, but {rule.code} {rule.name} has {kind}")
    if orphans := tables.keys() - by_table.keys():
        raise ValueError(f"thresholds.{min(orphans)} belongs to no rule; a table must have the name of its rule")


check_tables(all_rules(), Thresholds)


def thresholds_with(own: Iterable[Rule], base: type[Thresholds] = Thresholds) -> type[Thresholds]:
    """These thresholds with an additional table for each user rule that has none yet."""
    present = {table.name for table in fields(base)}
    tables: Any = tuple((rule.table, rule.settings) for rule in own if rule.table not in present)
    return _extended(cast(Any, base), tables)


@lru_cache(maxsize=64)  # equal tables must give the same class
def _extended(base: Any, tables: tuple[tuple[str, Any], ...]) -> type[Thresholds]:
    added = [(table, kind, kind()) for table, kind in tables if kind is not None]
    extended: type[Thresholds] = (
        make_dataclass(base.__name__, added, bases=(base,), frozen=True, kw_only=True) if added else base
    )
    return extended


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancing(Settings):
    """How `monitor.combine_losses(balance=…)` adjusts the task weights."""

    rate: float = between(0.05, 0.0, 1.0)
    """How far a weight moves toward its target per update, as a fraction on a log scale."""
    asymmetry: float = between(0.12, 0.0, 3.0)
    """GradNorm's alpha: how much more weight a slower task gets. The paper uses 0.12 for real images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots(Settings):
    """What goes into debug snapshots; see docs/snapshots.md."""

    automatic: bool = True
    """Whether a critical alert writes a snapshot. Until then it costs nothing."""
    most: int = between(3, 0)
    """Number of snapshots in a run from which on critical alerts write no more; `monitor.snapshot()` always does."""
    steps: int = between(200, 1, counts="steps")
    """Number of recent steps whose readings are saved."""
    keep_batches: int = between(0, 0, counts="steps")
    """Number of recent steps whose batches and random states are kept, to be saved and run again. They stay in memory,
    on the device where they are. On an accelerator or with several ranks, one more step is kept."""
    weights: Literal["off", "after", "before"] = "off"
    """Which weights are saved. `after`: those after the update. `before`: those before it, with which the step can be
    run again exactly; they are copied on every step, which takes the memory of another copy of the model, or of two
    on an accelerator or with several ranks. This needs `keep_batches`."""
    most_weight_bytes: int = between(4 << 30, 0)
    """Maximum size of the weights in a snapshot; larger ones are not saved."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.weights == "before" and not self.keep_batches:
            raise ValueError("Snapshots(weights='before') needs keep_batches of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Settings):
    """All settings of a monitor beyond the arguments of `watch`."""

    measure: Measure = Measure()
    """What is measured. It is fixed for a stored run, even if other settings are used to judge it later."""
    history_window: int = between(1024, 64, 1_000_000)
    """Number of values kept in memory per metric of the whole run."""
    detail_window: int = between(64, 16, 10_000)
    """Number of values kept in memory per aggregate and per tensor metric that a rule reads; about 5 bytes each."""
    escalation_steps: int = between(20, 0)
    """Number of steps after a warning on which everything is measured."""
    stall_seconds: float = between(120.0, 0.0)
    """Seconds without any sign of the loop, or 20 times the usual step if that is longer, after which a run hangs: the
    stacks of all threads are then written to `stalled.txt` in its directory. 0 disables it. Pauses do not count. In a
    notebook or at a prompt nothing is written."""
    early_stopping_patience: int = between(0, 0)
    """Number of epochs without a better validation loss after which `should_stop` is set; 0 disables it."""
    early_stopping_min_delta: float = between(0.0, 0.0)
    """Smallest decrease of the validation loss that counts as better."""
    notify: Sequence[str] = secret()
    """URLs of services to send alerts to, such as `slack://…` or `mailto://…`; see docs/notifications.md. They are not
    stored with the run. Without any, `watch` takes those in the environment variable FOREWARN_NOTIFY."""
    notify_at: Literal["info", "warning", "critical"] = "critical"
    """The least severity of alerts to send."""
    snapshots: Snapshots = Snapshots()
    """What a critical alert saves for debugging, and whether batches are kept for that."""
    disable: Sequence[str] = ()
    """Rules to turn off, by code or name."""
    rules: Sequence[str] = ()
    """Modules or paths of Python files with your own rules; see docs/your_own.md."""
    anomalies: Sequence[str] = ()
    """Metrics to watch for anomalies, such as `my/reward` or `my/*`; see the rule metric-anomaly."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    """What you declare about the run (dropout, total steps, batch size); remedies use these numbers."""
    objective: Literal["auto", "loss", "return"] = "auto"
    """What the run improves. With `loss`, the training loss must fall. With `return`, as in reinforcement learning or a
    GAN, the loss has no level of its own, and its rises are only information. `auto` means `return` if an environment
    library such as gymnasium is loaded, if each optimizer has a loss of its own, or if the loss keeps changing sign."""
    balancing: Balancing = Balancing()
    """How automatic loss weights are adjusted; used only with `monitor.combine_losses(balance=…)`."""
    policy: Policy = Policy()
    """What is done about alerts by itself; see docs/recovery.md. In TOML also the name of a preset, `"autopilot"`."""
    thresholds: Thresholds = Thresholds()

    @classmethod
    def of(cls, config: Config | Mapping[str, Any] | str | Path | None) -> Config:
        """A config from anything `watch(config=…)` accepts: a Config, a dict, the path of a TOML file, or None."""
        return cls.with_rules(config)[0]

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """A config from a TOML file, whose keys are the fields of this class."""
        return cls.of(Path(path))

    @classmethod
    def _moved(cls) -> Mapping[str, str]:
        return {field.name: f"measure.{field.name}" for field in fields(Measure)}

    @classmethod
    def with_rules(
        cls, config: Config | Mapping[str, Any] | str | Path | None, given: Iterable[Any] = ()
    ) -> tuple[Config, tuple[Rule, ...]]:
        """A config with a table of thresholds for each user rule, and these rules.

        User rules are those `given`, those in the modules that the config names, and those of installed packages.
        """
        given = tuple(given)
        if anomalies := tuple(metric for rule in given if isinstance(rule, Anomaly) for metric in rule.metrics):
            settings, own = cls.with_rules(config, (rule for rule in given if not isinstance(rule, Anomaly)))
            return replace(settings, anomalies=(*settings.anomalies, *anomalies)), own
        if isinstance(config, str | Path):
            config = read_toml(config)
        if not isinstance(config, Config | Mapping | None):
            raise TypeError(
                f"config must be a forewarn.Config, a dict of settings or the path of a TOML file, not {config!r}"
            )
        if config is None or isinstance(config, Config):
            config = config or cls()
            own = own_rules(given, config.rules)
            before = config.thresholds
            thresholds = thresholds_with(own, type(before))(**vars(before))
            return (config if thresholds == before else replace(config, thresholds=thresholds)), own
        if "policy" in config:
            config = {**config, "policy": Policy.of(config["policy"])}
        modules = cls.from_dict({"rules": config["rules"]}).rules if "rules" in config else ()
        own = own_rules(given, modules)
        return cls.from_dict(_with_tables(config, own)), own

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any], own: Iterable[Rule] = ()) -> Self:
        """The config of a stored run, for the built-in rules and the user's `own` rules.

        Settings that this version no longer has are ignored, so that the run can still be judged. So is `rules`: a run
        never decides what is imported.
        """
        own = tuple(own)
        present = cls().to_dict()
        present["thresholds"] = thresholds_with(own)().to_dict()
        common = _common({**stored, "measure": _measured(stored), "rules": ()}, present)
        disable = common.get("disable")
        if isinstance(disable, list | tuple):
            common["disable"] = [name for name in disable if not isinstance(name, str) or is_rule(name, own)]
        return cls.from_dict(_with_tables(common, own))

    @classmethod
    def for_stored(
        cls, plain: Mapping[str, Any], stored: Mapping[str, Any], given: Iterable[Any] = ()
    ) -> tuple[Config, tuple[Rule, ...]]:
        """The settings in `plain` for judging a stored run, and the user rules.

        Raises ValueError if they change what was fixed when the run was measured.
        """
        config, own = cls.with_rules(plain, given)
        of_the_run = cls.from_stored(stored)
        for table in ("measure", "hyperparameters"):
            before, after = (dict(_leaves(settings.to_dict()[table])) for settings in (of_the_run, config))
            for name, _ in _leaves(plain.get(table, {})):
                if after[name] != before.get(name):
                    was = f"with {before[name]!r}" if name in before else "without it"
                    raise ValueError(
                        f"[{table}] {name} = {after[name]!r} cannot be changed afterwards: the run was measured {was}; "
                        "remove this setting"
                    )
        if "objective" in plain and config.objective != of_the_run.objective:
            raise ValueError(
                f"objective = {config.objective!r} cannot be changed afterwards: the run was measured with "
                f"{of_the_run.objective!r}; remove this setting"
            )
        fixed = {name: getattr(of_the_run, name) for name in ("measure", "hyperparameters", "objective")}
        return replace(config, **fixed), own

    def rule_set(self, own: Iterable[Rule] = ()) -> RuleSet:
        """The rules that judge a run with this config: built-in and `own` rules.

        Those in `disable` and those about measurements that are switched off are left out.
        Raises ValueError if `disable` names an unknown rule.
        """
        rules = tuple(  # without metrics to watch for anomalies, that rule has nothing to judge
            replace(rule, when=tuple(self.anomalies)) if rule.code == ANOMALY else rule for rule in (*all_rules(), *own)
        )
        settings = {
            rule.code: getattr(self.thresholds, rule.table, None) or rule.settings()
            for rule in rules
            if rule.settings is not None
        }
        measure = self.measure.to_dict()
        off = {find_rule(name, rules).code for name in self.disable}
        off |= {rule.code for rule in rules if all(switched_off(name, measure) for name in rule.when)}
        return RuleSet(
            tuple(rule for rule in rules if rule.code not in off), settings, self.history_window, self.detail_window,
            tuple(rule for rule in rules if rule.code in off),
        )  # fmt: skip


def _with_tables(plain: Mapping[str, Any], own: Iterable[Rule]) -> Mapping[str, Any]:
    """These settings with the thresholds parsed, including those of user rules."""
    tables = plain.get("thresholds", {})
    if not isinstance(tables, Mapping):
        return plain
    return {**plain, "thresholds": thresholds_with(own).from_dict(tables, "thresholds")}


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, unchecked."""
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8")
        if _longest_key(text) > _MOST_KEY_PARTS:
            raise ValueError(f"a key has more than {_MOST_KEY_PARTS} parts")
        plain = tomllib.loads(text)
        check_depth(plain)
    except RecursionError:
        raise ValueError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    return plain


def _longest_key(text: str) -> int:
    """An upper bound on the number of parts in the longest dotted key, not counting the first and last part."""
    lines = (line.split(".") for line in _QUOTED.sub("x", text).splitlines())
    runs = (
        sum(1 for _ in parts) for line in lines for is_key, parts in groupby(line, key=_is_key_part) if is_key
    )  # fmt: skip
    return max(runs, default=0)


def _is_key_part(text: str) -> bool:
    return _KEY_PART.fullmatch(text) is not None


def _measured(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The measurement settings of a stored config, including those that earlier versions kept elsewhere."""
    tables = _table(stored, "thresholds")
    sources = [(stored, Config), *((_table(tables, name), kind) for name, kind in get_type_hints(Thresholds).items())]
    earlier = {
        place.removeprefix("measure."): plain[name]
        for plain, kind in sources
        for name, place in kind._moved().items()
        if name in plain
    }
    return {**earlier, **_table(stored, "measure")}


def _table(stored: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = stored.get(name, {})
    if not isinstance(table, Mapping):
        raise TypeError(f"setting {name!r} must be a table of settings, not {table!r:.80}")
    return table


def _common(stored: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings that this version still has."""
    return {
        name: _common(value, present[name]) if isinstance(value, Mapping) and present[name] else value
        for name, value in stored.items()
        if name in present
    }


def _leaves(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is not a table, with its dotted name."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
