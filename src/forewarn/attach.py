"""`watch`: builds a monitor from its parts, with good defaults."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forewarn import __version__
from forewarn.act.guard import Guard
from forewarn.act.recovery import Recovery
from forewarn.act.task_losses import TaskLosses
from forewarn.act.training_state import Parts, unwrapped_optimizer
from forewarn.catalogue import Catalogue
from forewarn.config import Config, Snapshots
from forewarn.judge.registry import Rule
from forewarn.measure.budget import Budget
from forewarn.measure.cadence import Cadence
from forewarn.measure.engine import ALL_BLOCKS, backend_of
from forewarn.measure.exchange import Exchange
from forewarn.measure.kept_batches import KeptBatches
from forewarn.measure.loop import Loop
from forewarn.measure.metric_kinds import ModuleMetric
from forewarn.measure.module_tree import Models, children_of, unwrapped
from forewarn.measure.options import Measure
from forewarn.measure.own_probes import check_probes
from forewarn.measure.parameters import ParameterIndex, block_names
from forewarn.measure.peers import num_ranks
from forewarn.measure.probe import Probe
from forewarn.measure.probes.activations import ActivationProbe
from forewarn.measure.probes.attention import AttentionProbe
from forewarn.measure.probes.batch import BatchProbe
from forewarn.measure.probes.evaluation import EvaluationProbe
from forewarn.measure.probes.gain import GainProbe
from forewarn.measure.probes.gradients import GradientProbe
from forewarn.measure.probes.logits import LogitsProbe
from forewarn.measure.probes.loss import LossProbe
from forewarn.measure.probes.lr import LearningRateProbe
from forewarn.measure.probes.module_metrics import MetricsProbe, series_name
from forewarn.measure.probes.normalization import BatchNormProbe
from forewarn.measure.probes.rank_comparison import RanksProbe
from forewarn.measure.probes.representation import RepresentationProbe
from forewarn.measure.probes.router import RouterProbe
from forewarn.measure.probes.sharing import SharingProbe
from forewarn.measure.probes.speed import SpeedProbe, device_event
from forewarn.measure.probes.stepping import SteppingProbe
from forewarn.measure.probes.system import SystemProbe
from forewarn.measure.probes.tasks import TaskProbe
from forewarn.measure.probes.updates import UpdateProbe
from forewarn.measure.probes.user import UserProbe
from forewarn.measure.probes.weights import WeightProbe
from forewarn.measure.schedule import Escalation, Schedule, as_predicate
from forewarn.measure.shards import are_of_another_fsdp, ranks_together
from forewarn.measure.stages import Candidate, without_stage
from forewarn.measure.stopwatch import Stopwatch
from forewarn.measure.tensor_reader import TensorReader
from forewarn.metrics import BUILT_IN
from forewarn.monitor import Monitor
from forewarn.plan import Plan
from forewarn.policy import Policy
from forewarn.snapshots.evidence import Evidence
from forewarn.snapshots.writing import NEEDS_SAFETENSORS, SnapshotWriter
from forewarn.store.claim import new_directory
from forewarn.store.deletion import delete_run
from forewarn.store.errors import RunExistsError
from forewarn.store.rank_logs import RankLogWriter
from forewarn.store.reader import Run, open_run
from forewarn.store.writer import RunWriter
from forewarn.types import Alert, Block, RuleInfo, RunInfo
from forewarn.views import View
from forewarn.views.console import AlertLines
from forewarn.views.notify import Listener, Notifier, services

_INTERVAL = "monitor/detail_interval"

ENVIRONMENTS = ("gymnasium", "gym", "pettingzoo", "dm_env", "ale_py", "procgen", "envpool")
"""Libraries of environments: a program that loads one trains for a return."""

HISTOGRAM_BLOCKS = {"off": 0, "sampled": 16, "full": ALL_BLOCKS}
"""Largest tensor, in blocks of 4096 values, to count in full, by `Measure.histograms`; of larger ones, 1 in 16."""


def watch(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    run: str | Path | None = None,
    *,
    every: int | Schedule | Callable[[int], bool] = 100,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    views: Sequence[View] | None = None,
    policy: str | Policy | Mapping[str, Any] | None = None,
    scaler: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    metrics: Sequence[ModuleMetric] = (),
    rules: Sequence[Any] = (),
    probes: Sequence[Probe] = (),
    budget: float | None = None,
    notify: Sequence[str] = (),
    notify_at: str | None = None,
    on_alert: Callable[[Alert], Any] | None = None,
) -> Monitor:
    """Attach a monitor to a model and its optimizer; call its `step(loss)` once per optimizer step.

    - `model`: the model, or several by name that are one run: `watch({"G": generator, "D": discriminator}, [g, d])`.
    - `run`: the directory to record in; by default a new one under `runs/`. If it holds a finished run, the new run
      gets the next free name, such as `runs/exp1-2`. The start line and `monitor.path` show the name.
    - `every`: measure all tensors on the first 10 steps, then every N steps. Also accepts a `Schedule` or a function
      of the step. Loss, learning rate, global gradient norm and time are read on every step.
    - `config`: a `Config`, a dict of its settings, or the path of a TOML file.
    - `views`: where to show the run. By default, alerts are printed to standard error; `[]` shows nothing.
    - `policy`: what is done about alerts. `"observe"`, the default, only reports; `"stop"` sets `monitor.should_stop`
      when an alert is critical; `"autopilot"` skips bad batches, lowers the learning rate and rolls back. A dict maps
      rules, families or severities to actions: `{"loss-spike": "snapshot"}`. See docs/recovery.md.
    - `scaler`: the `GradScaler`, so that gradients are measured unscaled.
    - `resume`: continue the run in the directory.
    - `overwrite`: delete the run in the directory, unless a process is still writing it. Other files are kept.
    - `metrics`: your own metrics, such as `forewarn.ActivationMetric("kurtosis", function)`, read on measured steps.
      With `healthy=(low, high)`, values that stay outside the range raise an alert.
    - `rules`: your own rules: functions decorated with `@forewarn.rule(...)`, or modules that contain them.
    - `probes`: your own probes: instances of subclasses of `forewarn.Probe`.
    - `budget`: the share of the run's time that measuring in detail may take, such as 0.01. If it takes more, `every`
      is raised, at multiples of 500 steps. The first 10 steps and those after a warning are exempt.
    - `notify`: URLs of services to send alerts to: `["slack://…", "mailto://…"]`. By default those of the config, or
      of the environment variable FOREWARN_NOTIFY, separated by spaces.
    - `notify_at`: the least severity to send: `"info"`, `"warning"` or `"critical"`, the default.
    - `on_alert`: a function that is called with each alert that fires, gets worse or resolves.
    """
    model = checked_model(model)
    optimizers = checked_optimizers(optimizer, scaler)
    _check_arguments(run, views, resume, overwrite, metrics, rules)
    predicate = as_predicate(every)
    _check_budget(budget, predicate)
    settings, own_rules = Config.with_rules(config, rules)
    settings = _with_notify(settings, notify, notify_at)
    settings = settings if policy is None else replace(settings, policy=Policy.of(policy))
    settings.policy.checked(own_rules)
    rule_set = settings.rule_set(own_rules)  # an unknown rule in the config must fail before anything is created
    parameter_index, unreadable = _parameter_index(model, optimizers)
    ranks = num_ranks()
    parameter_index.rank = torch.distributed.get_rank() if ranks > 1 else None
    measure = settings.measure
    if unreadable is None:
        _check_parameters(parameter_index, model)
    else:  # settings that name parts of the model would fail, which is not the user's mistake
        metrics, measure = (), replace(measure, blocks="", router="")
    _check_plan(parameter_index, measure.plan)
    may_be_stage = ranks > 1 and len(ranks_together(model, parameter_index.parameters)) < ranks
    device = next((parameter.device for parameter in parameter_index.parameters), None)
    stopwatch = Stopwatch(make_event=device_event if device is not None and device.type == "cuda" else None)
    all_probes = _probes(parameter_index, measure, scaler, stopwatch, metrics, settings.hyperparameters)
    guard = _guard(settings.policy, parameter_index, model, all_probes)
    all_probes |= {} if guard is None else {guard.name: guard}
    declared = check_probes(probes, all_probes)
    catalogue = BUILT_IN.extended(declared)
    _check_reads(own_rules, catalogue)
    all_probes |= {"user": UserProbe(catalogue)} | {probe.name: probe for probe in probes}
    info = _run_info(parameter_index, settings, measure.blocks, predicate, budget, metrics)
    info = replace(
        info, rules=tuple(RuleInfo(rule.code, rule.name) for rule in rule_set.rules),
        probe_metrics=tuple(metric.to_plain() for metric in declared),
    )  # fmt: skip
    earlier = open_run(run) if resume and run is not None and (Path(run) / "run.json").exists() else None
    if earlier is not None:
        _check_same_model(earlier, info)
        info = _with_earlier(info, earlier.info)
    first = parameter_index.records
    shown_in = _views(views, settings, on_alert) if first else []
    running = [probe for probe in all_probes.values() if first or may_be_stage or probe.on_every_rank]
    loop = Loop(model, optimizers, running, stopwatch, parameter_index, attach=False)
    if first and settings.snapshots.keep_batches:
        loop.kept = _kept_batches(model, optimizers, settings.snapshots, device, ranks)
    schedule = Escalation(predicate, settings.escalation_steps)
    if earlier is not None and budget is not None and _INTERVAL in earlier.names():
        schedule.stretch(0, max(info.every, int(earlier.series(_INTERVAL).values[-1])))
    writer: RunWriter | None = None
    exchange: Exchange | None = None
    try:
        if unreadable is not None:
            loop.report("model", "model", unreadable)
        if first:
            resume_at = None if earlier is None else 0 if earlier.last_step is None else earlier.last_step + 1
            if overwrite and run is not None:
                delete_run(Path(run))
            writer = _writer(run, info, settings, resume, resume_at)
        if parameter_index.rank is not None:
            log = RankLogWriter(parameter_index.rank, None if writer is None else writer.flush)
            candidate = Candidate(
                parameter_index, info, catalogue,
                read=lambda step, arrays: step.readings(list(arrays), loop.guard),
                settle=lambda leads: None if leads else loop.keep_only(lambda probe: probe.on_every_rank),
            ) if may_be_stage else None  # fmt: skip
            exchange = Exchange(
                _meeting_place(info), parameter_index.rank, ranks, lambda: parameter_index.shards,
                log, None if writer is None else writer.path.absolute(), candidate,
            )  # fmt: skip
        monitor = Monitor(
            loop=loop,
            probes=all_probes,
            stopwatch=stopwatch,
            cadence=Cadence(schedule, None if budget is None else Budget(budget, info.every), exchange),
            config=settings,
            rule_set=rule_set,
            info=info,
            writer=writer,
            views=shown_in,
            recovery=_recovery(settings.policy, Parts(model, optimizers, scaler), guard, exchange),
            optimizers=optimizers,
            scaler=scaler,
            evidence=Evidence(SnapshotWriter(model, info, settings, ranks, loop.kept), stopwatch),
            exchange=exchange,
        )
        if earlier is not None:
            with earlier:
                _recall(monitor, earlier)
        loop.attach()  # last: an error before this point leaves model and optimizer untouched
        if guard is not None:
            loop.attach_last(guard.before, guard.after)
        taken = Path(run) if writer is not None and run is not None and writer.path != Path(run) else None
        monitor.begin(instead_of=taken)
        return monitor
    except BaseException:  # also on an interrupt: nobody else would remove the hooks
        loop.close()
        if exchange is not None:
            exchange.finish()
        if writer is not None:
            writer.close("not started")
        raise


def _guard(
    policy: Policy, parameter_index: ParameterIndex, model: nn.Module, probes: Mapping[str, Probe]
) -> Guard | None:
    """What skips batches, if the policy may."""
    if "skip_batch" not in policy.actions or not policy.skip_batch.times:
        return None
    stepping = probes["stepping"]
    assert isinstance(stepping, SteppingProbe)
    return Guard(policy.skip_batch, policy.is_dry("skip_batch"), parameter_index, model, stepping)


def _recovery(
    policy: Policy, parts: Parts, guard: Guard | None, exchange: Exchange | None
) -> Callable[[TaskLosses], Recovery] | None:
    """What carries out the policy; None if it only reports."""
    if not policy.actions:
        return None
    return lambda tasks: Recovery(policy, parts, tasks, guard, exchange)


def _kept_batches(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: Snapshots, device: torch.device | None, ranks: int
) -> KeptBatches:
    if importlib.util.find_spec("safetensors") is None:
        raise ModuleNotFoundError(NEEDS_SAFETENSORS, name="safetensors")
    is_late = ranks > 1 or (device is not None and device.type != "cpu")
    keep_weights = settings.weights == "before"
    return KeptBatches(model, optimizers, settings.keep_batches, keep_weights=keep_weights, is_late=is_late)


def _parameter_index(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[ParameterIndex, Exception | None]:
    """The parameters of a model; if they cannot be listed, an empty index and the error."""
    try:
        return ParameterIndex(model, optimizers), None
    except Exception as error:
        return ParameterIndex(nn.Module(), optimizers), error


def checked_model(model: Any) -> nn.Module:
    """The model, or several as one; raises TypeError or ValueError for a wrong one before training starts."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Mapping) or not model:
        raise TypeError(f"model must be a torch.nn.Module, or a dict of them by name, not {_described(model)}")
    for name, part in model.items():
        if not isinstance(part, nn.Module):
            raise TypeError(f"model must contain torch.nn.Modules by name, but {name!r} is {_described(part)}")
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a model's name must be a word such as 'generator', not {name!r}")
    if len(set(map(id, model.values()))) < len(model):
        raise ValueError("model contains the same torch.nn.Module under two names; name it once")
    return Models(model)


def checked_optimizers(optimizer: Optimizer | Sequence[Optimizer], scaler: Any) -> tuple[Optimizer, ...]:
    """The optimizers as a tuple; raises TypeError for a wrong optimizer or scaler before training starts."""
    optimizers = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    if not optimizers:
        raise TypeError(f"optimizer must be a torch Optimizer or a list of them, not {optimizer!r}")
    optimizers = [unwrapped_optimizer(candidate) for candidate in optimizers]
    for candidate in optimizers:
        if not isinstance(candidate, Optimizer):
            raise TypeError(f"optimizer must be a torch Optimizer or a list of them, but it contains {candidate!r}")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    return tuple(optimizers)


def _check_arguments(run: Any, views: Any, resume: Any, overwrite: Any, metrics: Any, rules: Any) -> None:
    if run is not None and not isinstance(run, str | Path):
        raise TypeError(f"run must be the path of a directory, not {run!r}")
    for name, value in (("resume", resume), ("overwrite", overwrite)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")
    if resume and overwrite:
        raise ValueError("resume=True continues the existing run and overwrite=True deletes it: use only one of them")
    if isinstance(metrics, ModuleMetric | str) or not isinstance(metrics, Sequence):
        raise TypeError(f"metrics must be a list of metrics, not {metrics!r}; use metrics=[...]")
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(f"rules must be a list of rules, not {_described(rules)}; use rules=[...]")
    if views is None:
        return
    if isinstance(views, str) or not isinstance(views, Sequence):
        raise TypeError(f"views must be a list of views, not {_described(views)}; use views=[...]")
    for view in views:
        if isinstance(view, type) or not (hasattr(view, "show") and hasattr(view, "close")):
            raise TypeError(f"views must contain view instances, such as forewarn.LiveView(), not {_described(view)}")


def _check_budget(budget: Any, predicate: Callable[[int], bool]) -> None:
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f"budget must be a share of the run's time, such as 0.01, or None, not {_described(budget)}")
    if not 0 < budget < 1:
        percent = f"; for {budget:g}%, write {budget / 100:g}" if 1 <= budget < 100 else ""
        raise ValueError(f"budget must be a share of the run's time between 0 and 1, not {budget}{percent}")
    if not isinstance(predicate, Schedule):
        raise ValueError("budget changes the interval, so every must be a number or a Schedule, not a function")


def _with_notify(settings: Config, notify: Any, lowest: Any) -> Config:
    """The settings with the arguments of `watch`, or the environment, about notifications."""
    if isinstance(notify, str) or not isinstance(notify, Sequence):
        raise TypeError(f"notify must be a list of URLs, not {type(notify).__name__}; use notify=[...]")
    urls = notify or settings.notify or os.environ.get("FOREWARN_NOTIFY", "").split()
    return replace(settings, notify=urls, notify_at=settings.notify_at if lowest is None else lowest)


def _views(views: Sequence[View] | None, settings: Config, on_alert: Callable[[Alert], Any] | None) -> list[View]:
    """Where the run is shown, and who is told about alerts."""
    if on_alert is not None and not callable(on_alert):
        raise TypeError(f"on_alert must be a function of an alert, not {_described(on_alert)}")
    shown_in: list[View] = [AlertLines()] if views is None else list(views)
    shown_in += [Notifier(services(settings.notify), settings.notify_at)] if settings.notify else []
    shown_in += [Listener(on_alert)] if on_alert is not None else []
    return shown_in


def _described(value: Any) -> str:
    """A wrong argument as errors show it. For objects that is the type, since their repr is often just an address."""
    return repr(value) if isinstance(value, str | int | float | type | None) else type(value).__name__


def _check_parameters(parameter_index: ParameterIndex, model: nn.Module) -> None:
    if not parameter_index.names:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to watch; pass the model that you train"
        )
    if are_of_another_fsdp(model, parameter_index.parameters):
        raise ValueError(
            f"this {type(unwrapped(model)).__name__} is inside a FullyShardedDataParallel, which holds its parameters; "
            "pass that to watch"
        )
    for index, optimizer in enumerate(parameter_index.optimizers):
        if not len(parameter_index.of(index)):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this {type(unwrapped(model)).__name__}: it was "
                "created for another model, or before the parameters were replaced; create it from model.parameters()"
            )


def _check_plan(parameter_index: ParameterIndex, plan: Plan) -> None:
    present, planned = sum(len(optimizer.param_groups) for optimizer in parameter_index.optimizers), plan.num_groups
    if planned not in (None, present):
        raise ValueError(
            f"the plan has schedules for {planned} parameter groups, but the optimizers have {present}; for several "
            "optimizers, pass a list of their schedulers to Plan.from_scheduler"
        )


def _check_reads(own_rules: Sequence[Rule], catalogue: Catalogue) -> None:
    for rule in own_rules:
        if missing := catalogue.unknown(rule.reads):
            raise ValueError(
                f"your rule {rule.code} {rule.name} reads {', '.join(missing)}, which no probe records; use a "
                "metric in docs/metrics.md or one that your probes declare"
            )


def _probes(
    parameter_index: ParameterIndex,
    measure: Measure,
    scaler: Any,
    stopwatch: Stopwatch,
    metrics: Sequence[ModuleMetric] = (),
    hyperparameters: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Probe]:
    """Every probe by name. Their order does not matter: they are called in the order of their dependencies."""
    reader = TensorReader(HISTOGRAM_BLOCKS[measure.histograms], measure.exact_percentiles)
    everything: list[Probe] = [
        LearningRateProbe(parameter_index.optimizers, measure.plan.share),
        SteppingProbe(parameter_index.optimizers, scaler),
        SharingProbe(parameter_index),
        LossProbe(measure.ema_decay if measure.enable_ema_loss else None),
        SpeedProbe(stopwatch, _flops_share(hyperparameters)),
        SystemProbe(next((parameter.device for parameter in parameter_index.parameters), None)),
        UserProbe(),
        MetricsProbe(parameter_index, metrics),
        TaskProbe(parameter_index, scaler),
        EvaluationProbe(),
    ]
    if measure.gradients:
        everything.append(GradientProbe(parameter_index, scaler, reader))
    if measure.gain:
        everything.append(GainProbe(parameter_index, measure.blocks, measure.mean_gain_drift_window))
    if measure.updates:
        everything.append(UpdateProbe(parameter_index, sample_size=measure.sample_size))
    if measure.weights:
        everything.append(WeightProbe(parameter_index, reader))
    if parameter_index.rank is not None:
        everything.append(RanksProbe(parameter_index))
    if measure.activations:
        everything.append(ActivationProbe(
            parameter_index, modules=measure.modules, rows=measure.activation_rows,
            window=measure.dead_unit_window, least_positions=measure.dead_unit_positions,
            saturated_from=measure.saturation_level,
        ))  # fmt: skip
        everything += [
            BatchProbe(parameter_index.called),
            RepresentationProbe(parameter_index),
            BatchNormProbe(parameter_index),
            LogitsProbe(parameter_index.called),
        ]
    if measure.attention:
        everything.append(AttentionProbe(parameter_index, stopwatch))
    if measure.router:
        everything.append(RouterProbe(parameter_index.called, measure.router, measure.router_top_k))
    provided = {fact for probe in everything for fact in probe.provides}
    for probe in everything:  # what is switched off provides nothing
        probe.needs = {fact: metrics for fact, metrics in probe.needs.items() if fact in provided}
    return {probe.name: probe for probe in everything}


def _flops_share(hyperparameters: Mapping[str, Any]) -> float | None:
    """The declared operations per token as a share of the device's peak per second; None if one is not declared."""
    flops, peak = (hyperparameters.get(name) for name in ("flops_per_token", "peak_flops"))
    return flops / peak if isinstance(flops, int | float) and isinstance(peak, int | float) and peak > 0 else None


def _run_info(
    parameter_index: ParameterIndex,
    config: Config,
    blocks: str,
    predicate: Callable[[int], bool],
    budget: float | None,
    metrics: Sequence[ModuleMetric],
) -> RunInfo:
    some_tensor = next(iter(parameter_index.parameters), torch.empty(0))
    parameters = parameter_index.info()
    return RunInfo(
        model=" + ".join(_model_names(parameter_index.model)),
        num_parameters=sum(math.prod(parameter.shape) for parameter in parameters.values()),
        parameters=parameters,
        modules=_numbered_modules(parameter_index.model),
        blocks=block_names(parameter_index.model, blocks),
        optimizers=tuple(type(optimizer).__name__ for optimizer in parameter_index.optimizers),
        groups=tuple(_numbers(group) for optimizer in parameter_index.optimizers for group in optimizer.param_groups),
        hyperparameters=dict(config.hyperparameters),
        objective="return" if config.objective == "auto" and _acts_in_an_environment() else config.objective,
        every=predicate.every if isinstance(predicate, Schedule) else 0,
        budget=budget or 0.0,
        dead_unit_window=config.measure.dead_unit_window,
        saturation_level=config.measure.saturation_level,
        metrics={series_name(metric): metric.range for metric in metrics if isinstance(metric, ModuleMetric)},
        device=str(some_tensor.device),
        versions={
            "forewarn": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "statistics": backend_of(some_tensor),
        },
        started=time.time(),
    )


def _model_names(model: nn.Module) -> Iterator[str]:
    """The class of the model; of several watched as one, their names too."""
    if not isinstance(model, Models):
        yield type(model).__name__
    else:
        yield from (f"{name} ({type(child).__name__})" for name, child in children_of(model).items())


def _acts_in_an_environment() -> bool:
    """Whether a library of environments for reinforcement learning is loaded."""
    return any(library in sys.modules for library in ENVIRONMENTS)


def _numbered_modules(model: nn.Module) -> dict[str, str]:
    """The class of each module whose name is only a number, by name; empty if the model cannot list its modules."""
    try:
        modules = list(model.named_modules())
    except Exception:
        return {}
    return {name: type(module).__name__ for name, module in modules if name.rpartition(".")[2].isdigit()}


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The numeric settings of an optimizer group; a pair such as betas becomes beta1 and beta2."""
    numbers: dict[str, float] = {}
    for name, value in group.items():
        several = enumerate(value, start=1) if name == "betas" and isinstance(value, list | tuple) else ()
        for key, setting in [(name, value), *((f"beta{index}", beta) for index, beta in several)]:
            is_number = isinstance(setting, int | float) and not isinstance(setting, bool)
            if is_number or (isinstance(setting, torch.Tensor) and setting.numel() == 1):
                numbers[key] = float(setting)
    return numbers


def _with_earlier(info: RunInfo, earlier: RunInfo) -> RunInfo:
    """The info of a resumed run, including the rules and metrics of its earlier part."""
    rules = {rule.code: rule for rule in (*earlier.rules, *info.rules)}
    metrics = {str(plain.get("name")): plain for plain in (*earlier.probe_metrics, *info.probe_metrics)}
    return replace(info, rules=tuple(rules.values()), probe_metrics=tuple(metrics.values()))


def _check_same_model(earlier: Run, info: RunInfo) -> None:
    """Raise ValueError if the run to resume has a model that shares less than half of these parameters."""
    before, now = earlier.info.parameters, info.parameters
    shapes = {(without_stage(name), parameter.shape) for name, parameter in before.items()}
    shared = [name for name, parameter in now.items() if (without_stage(name), parameter.shape) in shapes]
    if before and 2 * len(shared) < len(now):
        raise ValueError(
            f"{earlier.path} holds a run of a different model ({earlier.info.model}, {len(shared)} of {len(now)} "
            "parameters match); choose another path with run="
        )


def _recall(monitor: Monitor, earlier: Run) -> None:
    """Fill the history of a resumed monitor from the stored run."""
    if earlier.last_step is None:
        return
    last_ema = float("nan")
    if "train/loss_ema" in earlier.names():
        averages = earlier.series("train/loss_ema").values
        last_ema = float(averages[-1]) if len(averages) else last_ema
    start = max(0, earlier.last_step + 1 - 2 * monitor.config.history_window)
    monitor.recall(itertools.chain(_evaluations(earlier, start), earlier.steps(start)), last_ema)


def _evaluations(earlier: Run, until: int) -> Iterator[tuple[int, list[Block]]]:
    """All evaluations before step `until`; there are few."""
    by_step: dict[int, list[Block]] = {}
    for name in earlier.names():
        of_epochs = name == "eval/loss" or name.startswith("evaluation/")
        if not of_epochs or "" not in earlier.scopes(name):
            continue
        series = earlier.series(name)
        for step, value in zip(series.steps.tolist(), series.values, strict=True):
            if step < until:
                by_step.setdefault(step, []).append(Block(step, 0.0, name, ("",), value.reshape(1)))
    yield from sorted(by_step.items())


def _writer(run: str | Path | None, info: RunInfo, settings: Config, resume: bool, resume_at: int | None) -> RunWriter:
    """The writer of a run. Without a path, or if it holds a finished run, a new directory is used."""
    begin = partial(RunWriter, info=info, config=settings.to_dict())
    if run is None:
        return begin(new_directory(Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")))
    try:
        return begin(run, resume_at=resume_at)
    except RunExistsError:
        if resume:
            raise
        return begin(new_directory(Path(run)))


def _meeting_place(info: RunInfo) -> str:
    """The name under which the ranks that watch the same model find each other, also if some ranks watch another."""
    return str(zlib.crc32("\n".join(info.parameters).encode(errors="replace")))
