"""One contract over every probe: named, documented, quiet without events, harmless, resumable, and never in the way.

Every probe is made to fail in every event that the base class declares: both are discovered, so none is left out.
"""

import dataclasses
import inspect
import io
import random
import typing
from functools import lru_cache
from unittest import mock

import pytest
import torch
from torch import nn

import forewarn
from forewarn import attach
from forewarn.judge.history import Derivation
from forewarn.judge.rules import all_rules
from forewarn.measure.loop import Loop
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.portable_state import to_arrays
from forewarn.measure.probe import GradientTap, ModuleTap, Pending, Probe
from forewarn.measure.probes.gradients import GradientNorms
from forewarn.measure.probes.rank_comparison import RanksProbe
from forewarn.measure.probes.stepping import Stepping
from forewarn.measure.probes.updates import UpdateProbe
from forewarn.measure.step import Step
from forewarn.measure.stopwatch import Stopwatch
from forewarn.measure.transfer import on_host

STEPS = 8
CONFIG = forewarn.Config(measure=forewarn.Measure(router="router"), escalation_steps=0)
METRICS = (
    forewarn.GradientMetric("size", lambda gradient: gradient.abs().mean()),
    forewarn.ActivationMetric("size", lambda output: output.abs().mean()),
    forewarn.ParameterMetric("size", lambda weights: weights.abs().mean()),
)
_UPDATES = {
    "gradient/block_norm", "update/norm", "update/ratio", "update/ratio_estimate", "update/frozen_cause",
    "monitor/update_ratio_median",
}  # fmt: skip
DEPENDENTS = {
    "stepping": _UPDATES | {
        "gradient/global_norm", "gradient/global_norm_clipped", "gradient/norm", "gradient/mean", "gradient/std",
        "gradient/nonfinite", "gradient/missing", "gradient/backward_passes", "train/clip",
        "gradient_metric/size",
    },
    "gradients": _UPDATES,
    "loss": {"evaluation/train_loss", "evaluation/end_loss"},
}  # fmt: skip
"""By probe: the metrics of others that are unavailable without it."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.router = nn.Linear(8, 3)
        self.act = nn.ReLU()
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.out(self.act(x)) * self.router(x).softmax(-1).amax(-1, keepdim=True)


class Everything(nn.Module):
    """Something for every probe: blocks, attention, routers, batch norm, dropout and two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.norm(x.mean(1))))


def setup():
    torch.manual_seed(0)
    model = Everything()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def made(model=None, optimizer=None) -> dict[str, Probe]:
    if model is None:
        model, optimizer = setup()
    return attach._probes(ParameterIndex(model, [optimizer]), CONFIG.measure, None, Stopwatch(), METRICS)


NAMES = list(made())
METHODS = [name for name, member in vars(Probe).items() if inspect.isfunction(member)]
CALLBACKS = {
    f"{kind.__name__}.{field}": (kind, field)
    for kind in (ModuleTap, GradientTap, Pending)
    for field, hint in typing.get_type_hints(kind, vars(inspect.getmodule(kind))).items()
    if "Callable" in str(hint) and field != "settle"  # called in runs of several processes only
}
EVENTS = [*METHODS, *CALLBACKS, "gradient_taps.GradientTap.reached"]


def step_of(model, optimizer, monitor, number, generator):
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()  # an optimizer that is not watched
    output = model(torch.rand(6, 9, 4, generator=generator))
    losses = {
        "class": nn.functional.cross_entropy(output, torch.arange(6) % 3),
        "size": output.square().mean(),
    }
    loss = losses["class"] + losses["size"] if monitor is None else monitor.combine_losses(losses, every=1)
    optimizer.zero_grad()
    loss.backward()
    if number >= STEPS // 2 and monitor is None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    elif number >= STEPS // 2:  # else the norm is read at the end of each backward pass
        monitor.clip_grad_norm_(1e6)
    optimizer.step()
    if monitor is not None:
        monitor.log("user/number", number)
        monitor.step(loss)
        if number == 2:
            state = monitor.state_dict()
            state["probes"] = {name: own or {"nothing": 0} for name, own in state["probes"].items()}
            monitor.load_state_dict(state)
        if number in (1, 4):
            monitor.end_epoch(val_loss=1.0)
    return loss.item()


def trained(model, optimizer, monitor=None):
    """What training comes to: every loss, every weight and buffer, and the state of the random numbers."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    losses = [step_of(model, optimizer, monitor, number, generator) for number in range(STEPS)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()


def assert_the_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())
    assert torch.equal(one[2], other[2])


@lru_cache(maxsize=1)
def bare():
    """The training without a monitor; not at import, where torch may use more threads and add in another order."""
    return trained(*setup())


def sabotage(probe, event, model):
    """Let a probe raise in an event, and in all that come after."""

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    if event in METHODS:
        setattr(probe, event, broken)
        if event == "needs_every_backward":  # only those are asked who listen on every step
            probe.only_measured = False
            probe.backward_ended = lambda *args, told=probe.backward_ended: told(*args)
        return
    collect, taps = probe.collect, probe.module_taps
    if event == "Pending.decode":
        probe.collect = lambda step: (collect(step) or Pending())._replace(decode=broken)
    elif event == "gradient_taps.GradientTap.reached":
        probe.gradient_taps = lambda: [GradientTap(model.head.weight, broken)]
    elif event == "GradientTap.reached":
        tap = ModuleTap(model.embed, left=lambda args, kwargs, output: [GradientTap(output, broken)])
        probe.module_taps = lambda: [*taps(), tap]
    else:
        field = {CALLBACKS[event][1]: broken}
        probe.module_taps = lambda: [dataclasses.replace(tap, **field) for tap in taps() or [ModuleTap(model.embed)]]


def check_a_failure(name, event, watch):
    model, optimizer = setup()
    monitor = watch(model, optimizer, every=lambda step: step % 4 != 3, config=CONFIG, metrics=METRICS)
    sabotage(monitor._probes[name], event, model)
    monitor._loop._listeners.clear()  # `watch` has already looked up who listens when a step begins
    assert_the_same(trained(model, optimizer, monitor), bare())
    assert [alert.scope for alert in monitor.alerts if alert.code == "X101"] == [name]
    told = [alert.scope for alert in monitor.alerts if alert.code == "X103"]
    assert sorted(told) == sorted(DEPENDENTS.get(name, ()))
    assert {alert.code for alert in monitor.alerts} <= {"X101", "X103"}


def decoded(pending: Pending | None):
    return [] if pending is None else list(pending.decode([on_host(tensor) for tensor in pending.tensors]))


# ---- what each probe is ----


@pytest.mark.parametrize("name", NAMES)
def test_it_is_named_and_says_what_it_measures(name):
    probe = made()[name]
    assert probe.name == name
    assert type(probe).__doc__
    assert type(probe).__module__.startswith("forewarn.measure.probes.")


def test_every_probe_is_among_them():
    declared = {one for one in Probe.__subclasses__() if one.__module__.startswith("forewarn.measure.")}
    assert {type(probe) for probe in made().values()} == declared - {RanksProbe}  # one rank cannot be compared


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_without_any_event_it_has_nothing_wrong_to_say(name, measured):
    for reading in decoded(made()[name].collect(Step(measured))):
        assert forewarn.types.is_metric_name(reading.name)
        assert reading.name not in ("gradient/global_norm", "train/loss")


@pytest.mark.parametrize("name", NAMES)
def test_its_state_survives_a_safe_save(name, watch):
    model, optimizer = setup()
    monitor = watch(model, optimizer, config=CONFIG, metrics=METRICS)
    trained(model, optimizer, monitor)
    file = io.BytesIO()
    torch.save(monitor.state_dict()["probes"][name], file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = made()[name]
    other.load_state_dict(to_arrays(state))
    assert repr(other.state_dict()) == repr(monitor._probes[name].state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_no_random_number_changes_no_tensor_and_leaves_the_gradient_mode(name):
    model, optimizer = setup()
    probe = made(model, optimizer)[name]
    model(torch.ones(2, 9, 4)).sum().backward()
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    before = [tensor.detach().clone() for tensor in tensors]
    random_state, mode = torch.get_rng_state(), torch.is_grad_enabled()
    for measured in (True, False):
        step = Step(measured)
        probe.backward_begins(step)
        probe.backward_ended(step)
        for closure in (True, False):
            probe.before_update(0, optimizer, step, closure)
            probe.after_update(0, optimizer, step, closure)
        decoded(probe.collect(step))
    assert torch.equal(random_state, torch.get_rng_state())
    assert torch.is_grad_enabled() is mode
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, tensors, strict=True))


# ---- what they tell each other ----


def test_a_probe_provides_and_takes_only_what_it_declares(watch):
    """Who asks is found by looking up the stack for the probe whose method it is."""
    provided: dict[str, set[type]] = {}
    taken: dict[str, set[type]] = {}

    def who() -> str:
        frame = inspect.currentframe()
        while not isinstance(frame.f_locals.get("self"), Probe):
            frame = frame.f_back
        return frame.f_locals["self"].name

    class Recorded(Step):
        def provide(self, fact):
            provided.setdefault(who(), set()).add(type(fact))
            super().provide(fact)

        def get(self, kind):
            taken.setdefault(who(), set()).add(kind)
            return super().get(kind)

    model, optimizer = setup()
    with mock.patch("forewarn.measure.loop.Step", Recorded), mock.patch("forewarn.monitor.Step", Recorded):
        monitor = watch(model, optimizer, config=CONFIG, metrics=METRICS)
        trained(model, optimizer, monitor)
    for probe in monitor._probes.values():
        assert provided.get(probe.name, set()) <= set(probe.provides)
        assert taken.get(probe.name, set()) == set(probe.needs)
    assert {probe.name for probe in monitor._probes.values() if probe.provides} == set(provided)


def test_no_probe_holds_another():
    probes = made().values()
    for probe in probes:
        assert not any(isinstance(value, Probe) for value in vars(probe).values())


@pytest.mark.parametrize("seed", range(4))
def test_readings_are_the_same_in_whatever_order_probes_are_listed(seed, watch, monkeypatch, tmp_path):
    def readings(run):
        unstable = ("speed/", "system/", "monitor/overhead")
        names = [name for name in run.names() if not name.startswith(unstable)]
        series = {(name, scope): run.series(name, scope) for name in names for scope in run.scopes(name)}
        return {key: (one.steps.tolist(), one.values.tobytes()) for key, one in series.items()}

    def recorded():
        model, optimizer = setup()
        monitor = watch(model, optimizer, config=CONFIG, metrics=METRICS)
        assert_the_same(trained(model, optimizer, monitor), bare())
        monitor.close()
        with forewarn.open_run(monitor._writer.path) as run:
            return readings(run)

    plain, listed = recorded(), attach._probes

    def shuffled(*args):
        probes = list(listed(*args).items())
        random.Random(seed).shuffle(probes)
        return dict(probes)

    monkeypatch.setattr(attach, "_probes", shuffled)
    assert recorded() == plain
    assert len(plain) > 200


# ---- what happens when one fails ----


def test_all_that_can_be_called_in_a_probe_is_an_event_here():
    assert {"forward_begins", "module_taps", "gradient_taps", "collect", "state_dict"} <= set(METHODS)
    assert set(CALLBACKS) == {"ModuleTap.entered", "ModuleTap.left", "GradientTap.reached", "Pending.decode"}
    assert "router" in NAMES


def test_the_run_is_healthy_when_no_probe_fails(watch):
    model, optimizer = setup()
    monitor = watch(model, optimizer, every=lambda step: step % 4 != 3, config=CONFIG, metrics=METRICS)
    assert_the_same(trained(model, optimizer, monitor), bare())
    assert monitor.alerts == ()
    assert {"gain/block", "attention/entropy", "router/entropy", "activation/batchnorm_state", "task/cosine"} <= set(
        monitor.history.names()
    )


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_in_any_event_is_one_alert_and_makes_no_other_probe_lie(name, event, watch):
    check_a_failure(name, event, watch)


def names_recorded(watch, broken=""):
    """Of a run: the metrics it recorded that rules read, by probe all that it recorded, and what X103 names."""
    model, optimizer = setup()
    monitor = watch(model, optimizer, every=1, config=CONFIG, metrics=METRICS)
    own: dict[str, set[str]] = {}

    def noted(probe):
        collect = probe.collect

        def noting(step):
            pending = collect(step)
            if pending is None:
                return None

            def decode(arrays):
                for reading in pending.decode(arrays):
                    own.setdefault(probe.name, set()).add(reading.name)
                    yield reading

            return pending._replace(decode=decode)

        probe.collect = noting

    for probe in monitor._probes.values():
        noted(probe)
    if broken:
        sabotage(monitor._probes[broken], "collect", model)
    trained(model, optimizer, monitor)
    judged = {name for rule in all_rules() for name in rule.reads} & {*monitor.history.names()}
    return judged, own, {alert.scope for alert in monitor.alerts if alert.code == "X103"}


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_takes_away_no_judged_metric_of_another_probe_in_silence(name, watch):
    healthy, own, _ = names_recorded(watch)
    judged, _, told = names_recorded(watch, broken=name)
    of_others = healthy - own.get(name, set()) - derived_from(own.get(name, set()))
    assert of_others - judged - derived_from(told) <= told


def derived_from(names):
    """What judging derives from these: it is missing because they are."""
    return {given for kind in Derivation.__subclasses__() if set(kind.sources) & names for given in kind.gives}


def left_behind(self, kind):
    """As if what a provider last said stayed when it fails."""
    lies = {Stepping: Stepping(False, False, ()), GradientNorms: GradientNorms.of_nothing(NUM_PARAMETERS)}
    return self._provided.get(kind, lies.get(kind))


NUM_PARAMETERS = list(setup()[0].parameters())


@pytest.mark.parametrize(
    ("target", "attribute", "mutant"),
    [
        (Step, "get", left_behind),
        (UpdateProbe, "needs", {Stepping: (), GradientNorms: ()}),
        (Loop, "unavailable", lambda self, step: iter(())),
        (Loop, "switch_off", lambda self, probe, error: torch.rand(1)),
        (Loop, "report", lambda self, what, name, error: None),
    ],
)
def test_the_contract_notices_a_probe_or_a_loop_that_breaks_it(target, attribute, mutant, watch, monkeypatch):
    monkeypatch.setattr(target, attribute, mutant)
    with pytest.raises(AssertionError):
        check_a_failure("stepping", "before_update", watch)
