"""Each family of measurements can be switched off, alone or with all others."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn.config import Config
from forewarn.judge.checklist import checklist
from forewarn.judge.diagnosis import replay
from forewarn.judge.forecast import LossCurve
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.measure.options import Measure
from forewarn.metrics import SWITCHES
from forewarn.types import FrozenCause

STEPS = 4


def off(*families: str) -> Measure:
    return Measure(**{family: "off" if family == "histograms" else False for family in families})


def run(path: Path, measure: Measure) -> forewarn.Monitor:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=8, depth=3, heads=2, width=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (2, 9))
    with forewarn.watch(model, optimizer, path, every=1, views=[], config=Config(measure=measure)) as monitor:
        for _ in range(STEPS):
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            monitor.step(loss)
    return monitor


def readings(path: Path) -> dict[tuple[str, str], np.ndarray]:
    with forewarn.open_run(path) as stored:
        series = {(name, scope): stored.series(name, scope).values for name in stored.names()
                  for scope in stored.scopes(name)}  # fmt: skip
        return series | {(name, ""): np.zeros(0) for name in stored.distributions()}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], np.ndarray]:
    path = tmp_path_factory.mktemp("all") / "run"
    torch.set_num_threads(1)  # as in every test
    run(path, Measure())
    return readings(path)


@pytest.mark.parametrize("family", SWITCHES)
def test_a_family_that_is_off_takes_its_metrics_with_it_and_changes_no_other(family, tmp_path, everything):
    monitor = run(tmp_path / "run", off(family))
    here = readings(tmp_path / "run")
    gone = {name for name, _ in everything} - {name for name, _ in here} - {"monitor/unavailable"}
    percentiles = {f"{of}/p{percent}" for of in ("gradient", "weight") for percent in ("01", 25, 50, 75, 95, 99)}
    expected = {name for name, _ in everything if any(fnmatchcase(name, pattern) for pattern in SWITCHES[family])}
    assert gone == expected | (percentiles if family == "histograms" else set())
    for key, values in here.items():
        if key[0].partition("/")[0] not in ("speed", "system") and key[0] != "monitor/overhead_share":
            assert np.array_equal(values, everything[key], equal_nan=True), key
    assert not monitor._loop.failures
    assert all(key in everything for key in here), "nothing is called unavailable because it is off"


def test_with_everything_off_nothing_is_hooked_and_no_rule_about_it_is_judged(tmp_path):
    monitor = run(tmp_path / "run", off(*SWITCHES))
    assert {name.partition("/")[0] for name, _ in readings(tmp_path / "run")} <= {
        "train", "speed", "system", "update", "monitor",
    }  # fmt: skip
    judged = {rule.code for rule in Config(measure=off(*SWITCHES)).rule_set().rules}
    assert {code for code in judged if code[0] in "AGW"} == {"A109", "A110", "G112"}, "they judge other readings too"
    assert not monitor.alerts
    with forewarn.open_run(tmp_path / "run") as stored:
        rule_set = Config.from_stored(stored.config).rule_set()
        diagnosis = replay(stored, rule_set)
        assert {rule.code for rule in stored.info.rules} == {rule.code for rule in rule_set.rules}
        by_name = {check.name: check for check in checklist(stored, rule_set, (), LossCurve(), None)}
        assert by_name["gradient norms in range"].detail == "off, by Measure(gradients=False)"
        assert by_name["update ratios in range"].detail == "off, by Measure(updates=False)"
        assert not diagnosis.not_judged
        with pytest.raises(KeyError, match=r"gain/block is off: the run was measured with Measure\(gain=False\)"):
            stored.series("gain/block", "blocks.0")


def test_no_hook_is_put_inside_the_model_if_nothing_there_is_measured(tmp_path, watch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model))
            return x

    model.append(Looks())
    for measure in (Measure(), off("gain", "activations", "attention")):
        monitor = watch(model, optimizer, config=Config(measure=measure))
        model(torch.ones(2, 4)).sum().backward()
        monitor.close()
    assert seen[0] > 0
    assert seen[1] == 0


def test_without_gradients_a_frozen_tensor_is_named_only_if_the_cause_is_known(watch):
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("moves", "unused", "zero")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = watch(model, optimizer, config=Config(measure=off("gradients")))
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model["moves"](torch.ones(1, 2)) + 0 * model["zero"](torch.ones(1, 2))).sum()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    causes = {name: monitor.history.series("update/frozen_cause", f"{name}.weight").last for name in model}
    assert causes == {"moves": FrozenCause.MOVING, "unused": FrozenCause.NO_GRADIENT, "zero": FrozenCause.MOVING}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"measure": {"histograms": False}}, 'must be one of off, sampled, full, not False; write "off"'),
        ({"measure": {"gain": "off"}}, "Measure.gain must be bool, not 'off'"),
        ({"measure": {"gradient": False}}, "unknown setting 'measure.gradient'; did you mean 'gradients'"),
        ({"measure": {"activations": False, "modules": "mlp"}}, "modules='mlp' chooses outputs to measure, but"),
        ({"gain": False}, r"gain moved to \[measure\]: write measure.gain"),
    ],
)
def test_a_wrong_switch_says_what_to_write(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Config.of(settings)
