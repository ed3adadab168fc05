"""A wrong argument is one sentence that says what was given, what was expected and, where it helps, what to do."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forewarn
from forewarn.judge.rules import find_rule
from forewarn.judge.rules.activations import SaturatedUnits
from forewarn.judge.rules.loss import LossSpike

METRIC = forewarn.ParameterMetric("mean")

WRONG_SETTINGS: dict[str, tuple[Any, type[Exception], str]] = {
    "an unknown setting": (
        lambda: forewarn.Config(sampel_size=3), TypeError,
        "Config has no setting 'sampel_size'; did you mean 'measure.sample_size'?",
    ),
    "an unknown setting of a nested table": (
        lambda: LossSpike(warning_facto=3), TypeError,
        "LossSpike has no setting 'warning_facto'; did you mean 'warning_factor'?",
    ),
    "an unknown setting that is like no other": (
        lambda: forewarn.Plan(zzz=3), TypeError,
        "Plan has no setting 'zzz'; choose from floor, knots, shape, total, warmup",
    ),
    "a setting without its name": (
        lambda: forewarn.Plan(3), TypeError, "Plan takes its settings by name, as in Plan(total=...)",
    ),
    "too many settings without a name": (
        lambda: forewarn.Schedule(100, 10, 1), TypeError, "Schedule takes at most 2 positional settings, not 3",
    ),
    "disable as one string": (
        lambda: forewarn.Config(disable="L102"), TypeError, "Config.disable must be a list of strings, not 'L102'",
    ),
    "disable with a number in it": (
        lambda: forewarn.Config(disable=["L102", 3]), TypeError,
        "Config.disable must be a list of strings, not ('L102', 3)",
    ),
    "a table as a dict": (
        lambda: forewarn.Measure(plan={"total": 3}), TypeError,
        "Measure.plan must be a Plan, not a dict; use Measure.from_dict for nested dicts",
    ),
    "a setting of the wrong type": (
        lambda: forewarn.Measure(sample_size="many"), TypeError, "Measure.sample_size must be int, not 'many'",
    ),
    "a setting out of range": (
        lambda: forewarn.Measure(ema_decay=2), ValueError, "Measure.ema_decay must be between 0 and 0.99999, not 2",
    ),
    "a choice that is none": (
        lambda: forewarn.Measure(histograms="some"), ValueError,
        "Measure.histograms must be one of off, sampled, full, not 'some'",
    ),
    "a setting that has moved": (
        lambda: forewarn.Config(sample_size=3), TypeError, "sample_size moved to [measure]: write measure.sample_size",
    ),
    "a key that has moved": (
        lambda: forewarn.Config.from_dict({"plan": {"total": 3}}), ValueError,
        "plan moved to [measure]: write measure.plan",
    ),
    "a key that has moved from a nested table": (
        lambda: forewarn.Config.from_dict({"thresholds": {"dead_units": {"window": 3}}}), ValueError,
        "thresholds.dead_units.window moved to [measure]: write measure.dead_unit_window",
    ),
    "a setting that has moved from a nested table": (
        lambda: SaturatedUnits(level=0.9), TypeError, "level moved to [measure]: write measure.saturation_level",
    ),
    "from_dict without a dict": (
        lambda: forewarn.Config.from_dict(3), TypeError, "Config.from_dict expects a dict of settings, not 3",
    ),
    "an unknown key in a dict": (
        lambda: forewarn.Config.from_dict({"thresholds": {"loss_spik": {}}}), ValueError,
        "unknown setting 'thresholds.loss_spik'; did you mean 'loss_spike'?",
    ),
    "a key that is no name": (
        lambda: forewarn.Plan.from_dict({3: 4}), ValueError,
        "unknown setting '3'; choose from floor, knots, shape, total, warmup",
    ),
    "a warm-up as long as the plan": (
        lambda: forewarn.Plan(total=10, warmup=10), ValueError, "Plan.warmup (10) must be less than Plan.total (10)",
    ),
    "knots that are none": (
        lambda: forewarn.Plan(total=9, shape="knots", knots="0:0 9:x"), ValueError,
        "Plan.knots must be step:share pairs such as '0:0 100:1', not '9:x'",
    ),
    "a plan of nothing": (
        lambda: forewarn.Plan.from_scheduler(None, 10), TypeError,
        "scheduler must be a torch learning-rate scheduler, not NoneType",
    ),
    "a plan of a length that is none": (
        lambda: forewarn.Plan.from_scheduler(None, "10"), TypeError,
        "total must be an integer, the number of steps in the whole run, not '10'",
    ),
    "a schedule of the wrong type": (
        lambda: forewarn.Schedule(every="often"), TypeError, "Schedule.every must be int, not 'often'",
    ),
    "a schedule out of range": (
        lambda: forewarn.Schedule(every=0), ValueError, "Schedule.every must be at least 1, not 0",
    ),
    "a schedule with an unknown setting": (
        lambda: forewarn.Schedule(evry=3), TypeError, "Schedule has no setting 'evry'; did you mean 'every'?",
    ),
    "a policy of one string": (
        lambda: forewarn.Policy("stop"), TypeError, "Policy.rules must be a Mapping, not 'stop'",
    ),
    "a policy with an unknown action": (
        lambda: forewarn.Policy({"critical": "rollback"}), ValueError,
        "unknown action 'rollback' for 'critical' in the policy; did you mean 'roll_back'?",
    ),
    "a run that is no path": (
        lambda: forewarn.open_run(3), TypeError, "path must name the directory of a run, a str or a Path, not 3",
    ),
    "a run that is not there": (
        lambda: forewarn.open_run("nowhere"), forewarn.RunError, "there is no nowhere; name the directory of a run",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_SETTINGS)
def test_a_wrong_setting_is_one_sentence(case):
    call, kind, sentence = WRONG_SETTINGS[case]
    with pytest.raises(kind, match=whole(sentence)):
        call()


WRONG_CALLS_OF_WATCH: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"model": 3}, TypeError, "model must be a torch.nn.Module, or a dict of them by name, not 3"),
    "no model": ({"model": {}}, TypeError, "model must be a torch.nn.Module, or a dict of them by name, not dict"),
    "a model among models": (
        {"model": {"G": "gan"}}, TypeError, "model must contain torch.nn.Modules by name, but 'G' is 'gan'",
    ),
    "the name of a model": (
        {"model": {"G.1": nn.Linear(2, 2)}}, ValueError, "a model's name must be a word such as 'generator', not 'G.1'",
    ),
    "the same model twice": (
        {"model": dict.fromkeys("GD", nn.Linear(2, 2))}, ValueError,
        "model contains the same torch.nn.Module under two names; name it once",
    ),
    "optimizer": (
        {"optimizer": "adam"}, TypeError,
        "optimizer must be a torch Optimizer or a list of them, but it contains 'adam'",
    ),
    "no optimizer": ({"optimizer": []}, TypeError, "optimizer must be a torch Optimizer or a list of them, not []"),
    "run": ({"run": 3}, TypeError, "run must be the path of a directory, not 3"),
    "every as text": (
        {"every": "often"}, TypeError, "every must be an int, a Schedule or a function of the step, not 'often'",
    ),
    "every 0": ({"every": 0}, ValueError, "every must be at least 1, not 0"),
    "config": (
        {"config": 3}, TypeError,
        "config must be a forewarn.Config, a dict of settings or the path of a TOML file, not 3",
    ),
    "a key of the config": (
        {"config": {"sampel_size": 3}}, ValueError,
        "unknown setting 'sampel_size'; did you mean 'measure.sample_size'?",
    ),
    "a view that is in no list": (
        {"views": forewarn.LiveView()}, TypeError,
        "views must be a list of views, not LiveView; use views=[...]",
    ),
    "the class of a view": (
        {"views": [forewarn.LiveView]}, TypeError,
        "views must contain view instances, such as forewarn.LiveView(), not <class 'forewarn.views.live.LiveView'>",
    ),
    "the name of a view": (
        {"views": ["live"]}, TypeError, "views must contain view instances, such as forewarn.LiveView(), not 'live'",
    ),
    "the name of rules": (
        {"rules": "my_rules"}, TypeError,
        "rules must be a list of rules, not 'my_rules'; use rules=[...]",
    ),
    "a rule that is in no list": (
        {"rules": find_rule("L102")}, TypeError,
        "rules must be a list of rules, not Rule; use rules=[...]",
    ),
    "what is no rule": (
        {"rules": [3]}, TypeError, "rules must be made by @forewarn.rule, or be modules that hold such rules, not 3",
    ),
    "rules in a config": (
        {"config": {"rules": "my_rules"}}, TypeError, "Config.rules must be a list of strings, not 'my_rules'",
    ),
    "rules that are nowhere": (
        {"config": {"rules": ["no_such_module"]}}, ValueError,
        "the rules in 'no_such_module' cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "a probe that is none": (
        {"probes": [3]}, TypeError, "probes must hold instances of subclasses of forewarn.Probe, not 3",
    ),
    "policy": (
        {"policy": "auto-pilot"}, ValueError,
        "policy must be 'observe', 'stop', 'autopilot', a forewarn.Policy, or a dict such as "
        "{'loss-spike': 'snapshot'}, not 'auto-pilot'; did you mean 'autopilot'?",
    ),
    "policy that is a list": (
        {"policy": ["stop"]}, ValueError,
        "policy must be 'observe', 'stop', 'autopilot', a forewarn.Policy, or a dict such as "
        "{'loss-spike': 'snapshot'}, not ['stop']",
    ),
    "policy for an unknown rule": (
        {"policy": {"loss-spikes": "stop"}}, ValueError,
        "the policy names 'loss-spikes', which is no rule, family or severity; did you mean 'loss-spike'?",
    ),
    "policy with an unknown setting": (
        {"policy": {"rules": {"critical": "stop"}, "lower_lr": {"time": 2}}}, ValueError,
        "unknown setting 'policy.lower_lr.time'; did you mean 'times'?",
    ),
    "scaler": ({"scaler": 2.0}, TypeError, "scaler must be a torch.amp.GradScaler, not float"),
    "resume": ({"resume": "yes"}, TypeError, "resume must be True or False, not 'yes'"),
    "overwrite": ({"overwrite": 1}, TypeError, "overwrite must be True or False, not 1"),
    "metrics by name": (
        {"metrics": "mean"}, TypeError,
        "metrics must be a list of metrics, not 'mean'; use metrics=[...]",
    ),
    "a metric that is in no list": (
        {"metrics": METRIC}, TypeError,
        f"metrics must be a list of metrics, not {METRIC!r}; use metrics=[...]",
    ),
    "a metric that is none": (
        {"metrics": ["mean"]}, TypeError,
        "metrics takes forewarn.ActivationMetric, GradientMetric and similar, not 'mean'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CALLS_OF_WATCH)
def test_a_wrong_argument_of_watch_is_one_sentence_and_leaves_nothing_behind(case, tmp_path):
    given, kind, sentence = WRONG_CALLS_OF_WATCH[case]
    model = nn.Linear(2, 2)
    right = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "run": tmp_path / "run"}
    with pytest.raises(kind, match=whole(sentence)):
        forewarn.watch(**{**right, **given})
    assert not list(tmp_path.iterdir())


WRONG_CALLS_OF_A_MONITOR: dict[str, tuple[Any, type[Exception], str]] = {
    "step": (
        lambda monitor: monitor.step("low"), TypeError, "loss must be a number or a tensor of one element, not 'low'",
    ),
    "step with many losses": (
        lambda monitor: monitor.step(torch.ones(3)), ValueError,
        "loss must be one number, but it is a tensor of shape (3,); pass its mean()",
    ),
    "end_epoch": (
        lambda monitor: monitor.end_epoch(val_loss="low"), TypeError,
        "val_loss must be a number or a tensor of one element, not 'low'",
    ),
    "adjust": (
        lambda monitor: monitor.adjust(3), TypeError, "scheduler must be a torch learning-rate scheduler, not 3",
    ),
    "clip_grad_norm_": (
        lambda monitor: monitor.clip_grad_norm_(None), TypeError,
        "max_norm must be a number, the largest allowed norm, not None",
    ),
    "combine_losses": (
        lambda monitor: monitor.combine_losses([1.0]), TypeError,
        "losses must map the name of each task to its loss, such as {'type': loss}, not [1.0]",
    ),
    "combine_losses with a number": (
        lambda monitor: monitor.combine_losses({"a": 1.0}), TypeError,
        "the loss of task 'a' must be a tensor of one number, not 1.0; take its mean()",
    ),
    "log under no name": (
        lambda monitor: monitor.log("accuracy", 1.0), ValueError,
        "a metric is named family/quantity, such as 'eval/accuracy', not 'accuracy'",
    ),
    "log of text": (
        lambda monitor: monitor.log("eval/accuracy", "high"), TypeError,
        "eval/accuracy must be a number or a tensor of one element, not 'high'",
    ),
    "forecast at half a step": (
        lambda monitor: monitor.forecast(at=1.5), TypeError,
        "at must be the number of a step, a whole number, not 1.5",
    ),
    "forecast of text": (
        lambda monitor: monitor.forecast(target="low"), TypeError,
        "target must be a loss to wait for, a number, not 'low'",
    ),
    "forecast of NaN": (
        lambda monitor: monitor.forecast(target=math.nan), ValueError, "target must be a loss to wait for, not nan",
    ),
    "load_state_dict of nothing": (
        lambda monitor: monitor.load_state_dict(None), ValueError,
        "state must be what monitor.state_dict() returned, not None",
    ),
    "load_state_dict of a model": (
        lambda monitor: monitor.load_state_dict(nn.Linear(1, 1).state_dict()), ValueError,
        "state must be what monitor.state_dict() returned, not a dict with the keys ['bias', 'weight']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CALLS_OF_A_MONITOR)
def test_a_wrong_argument_of_a_monitor_is_one_sentence(case, tmp_path):
    call, kind, sentence = WRONG_CALLS_OF_A_MONITOR[case]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        forewarn.watch(model, optimizer, tmp_path / "run", views=[]) as monitor,
        pytest.raises(kind, match=whole(sentence)),
    ):
        call(monitor)


def whole(sentence: str) -> str:
    return f"^{re.escape(sentence)}$"


def test_a_dict_is_a_config_and_disable_takes_any_sequence(tmp_path: Path):
    model = nn.Linear(2, 2)
    config = {"disable": ["L102"], "thresholds": {"loss_spike": {"k": 3.0}}}
    with forewarn.watch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "run", views=[], config=config
    ) as monitor:
        assert monitor.config == forewarn.Config.from_dict(config)
        assert monitor.config.thresholds.loss_spike.k == 3.0
    assert forewarn.Config(disable=["L102"]) == forewarn.Config(disable=("L102",))
    assert isinstance(hash(forewarn.Schedule()), int)
