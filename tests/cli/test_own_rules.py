"""`check`, `explain` and `rules` with rules of the user's own, and without those that a run was judged by."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import forewarn as public
from tests.cli.conftest import Said
from tests.judge.test_own_rules import SOURCE

Call = Callable[..., Said]

NAMED = "1 rule that judged this run live is not loaded here: Z101 high-loss; add --rules MODULE"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with `my_rules.py` in it."""
    (tmp_path / "my_rules.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    yield tmp_path
    sys.modules.pop("my_rules", None)


def train(path: Path, losses: list[float], resume: bool = False, **given: object) -> tuple[public.Alert, ...]:
    """A recorded run with these losses; its model is trained by something else."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with public.watch(model, optimizer, path, views=[], resume=resume, **given) as monitor:
        for loss in losses:
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor.alerts


CONFIG = {"rules": ["my_rules"], "thresholds": {"high_loss": {"limit": 3.0}}}
HIGH, LOW = [2.0] * 5 + [4.0], [2.0] * 6


def test_an_alert_of_a_rule_that_is_missing_here_is_counted_as_it_was_recorded(forewarn: Call, place: Path) -> None:
    live = train(place / "run", HIGH, config=CONFIG)
    assert [alert.code for alert in live] == ["Z101"]
    said = forewarn("check", place / "run")
    assert said.code == 1
    assert f"{NAMED} (its 1 alert recorded live counts here)" in said.out
    assert "high-loss Z101" in said.out
    assert "forewarn explain high-loss --rules MODULE" in said.out
    plain = json.loads(forewarn("check", place / "run", "--json").out)
    assert plain["not_judged"] == [{"code": "Z101", "name": "high-loss"}]
    assert (plain["verdict"], plain["exit_code"]) == ("warnings", 1)
    assert [alert["code"] for alert in plain["alerts"]] == ["Z101"]


def test_a_run_is_not_plainly_healthy_where_a_rule_is_missing(forewarn: Call, place: Path) -> None:
    assert train(place / "run", LOW, config=CONFIG) == ()
    said = forewarn("check", place / "run")
    assert said.code == 0
    assert "healthy by the rules loaded here: no alerts" in said.out
    assert f"{NAMED} (it raised no alert live)" in said.out
    plain = json.loads(forewarn("check", place / "run", "--json").out)
    assert (plain["verdict"], plain["exit_code"]) == ("healthy by the rules loaded here", 0)


@pytest.mark.parametrize("named", ["my_rules", "my_rules.py"])
def test_with_the_rule_a_check_gives_the_live_alerts_under_the_settings_of_the_run(
    forewarn: Call, place: Path, named: str
) -> None:
    live = train(place / "run", HIGH, config=CONFIG)
    said = forewarn("check", place / "run", "--rules", named, "--json")
    plain = json.loads(said.out)
    assert (said.code, plain["not_judged"], plain["verdict"]) == (1, [], "warnings")
    (alert,) = plain["alerts"]
    assert alert == json.loads(json.dumps(live[0].to_json())), "by the limit of 3 that is stored, not the default of 10"
    assert f"forewarn explain high-loss --rules {named}" in forewarn("check", place / "run", "--rules", named).out


def test_the_config_of_a_check_brings_rules_and_their_settings(forewarn: Call, place: Path) -> None:
    train(place / "run", HIGH)
    assert forewarn("check", place / "run").code == 0
    (place / "strict.toml").write_text('rules = ["my_rules"]\n[thresholds.high_loss]\nlimit = 1.0\n')
    plain = json.loads(forewarn("check", place / "run", "--config", "strict.toml", "--json").out)
    assert [(alert["code"], alert["since"]) for alert in plain["alerts"]] == [("Z101", 0)]
    (place / "quiet.toml").write_text('disable = ["high-loss"]\n')
    quiet = forewarn("check", place / "run", "--config", "quiet.toml", "--rules", "my_rules", "--json")
    assert json.loads(quiet.out)["not_judged"] == [], "it is loaded, and switched off on purpose"


def test_the_rules_of_both_parts_of_a_resumed_run_are_recorded(forewarn: Call, place: Path) -> None:
    train(place / "run", HIGH, config=CONFIG)
    train(place / "run", LOW, resume=True)
    with public.open_run(place / "run") as run:
        assert [rule.name for rule in run.info.rules if rule.code == "Z101"] == ["high-loss"]
        assert len({rule.code for rule in run.info.rules}) == len(run.info.rules) > 50
    assert NAMED in forewarn("check", place / "run").out


def test_a_run_of_an_earlier_version_names_no_rules_and_misses_none(forewarn: Call, healthy: Path) -> None:
    manifest = json.loads((healthy / "run.json").read_text())
    assert "rules" in manifest["facts"]
    del manifest["facts"]["rules"], manifest["facts"]["probe_metrics"]
    (healthy / "run.json").write_text(json.dumps(manifest))
    said = forewarn("check", healthy)
    assert (said.code, "healthy: no alerts" in said.out, "not loaded here" in said.out) == (0, True, False)


def test_a_run_never_makes_a_check_import_anything(forewarn: Call, place: Path, healthy: Path) -> None:
    """Every place of run.json that could name code does, also in the working directory."""
    (place / "evil.py").write_text(f"from pathlib import Path\nPath({str(place / 'ran')!r}).touch()\n{SOURCE}")
    (healthy / "evil.py").write_text((place / "evil.py").read_text())
    manifest = json.loads((healthy / "run.json").read_text())
    names = ["evil", "evil.py", str(place / "evil.py")]
    manifest["config"] |= {"rules": names, "disable": names, "probes": names, "modules": "evil"}
    manifest["config"]["thresholds"] |= {"evil": {"rules": names}, "rules": names, "high_loss": {"limit": "evil"}}
    manifest["rules"] = names
    manifest["facts"] |= {
        "rules": [{"code": "Z101", "name": "evil", "module": "evil", "settings": {"rules": names}}],
        "probe_metrics": [{"name": "evil/evil", "scope": "evil"}, {"module": "evil"}, {}],
    }
    (healthy / "run.json").write_text(json.dumps(manifest))
    for command in (["check"], ["check", "--json"], ["show"], ["forecast"]):
        said = forewarn(command[0], healthy, *command[1:])
        assert said.code == 0, said.err
    assert not (place / "ran").exists()
    assert "evil" not in sys.modules
    assert "not loaded here: Z101 evil" in forewarn("check", healthy).out
    forewarn("check", healthy, "--rules", "evil.py")
    assert (place / "ran").exists(), "the test would notice"
    sys.modules.pop("evil", None)


def test_a_rule_of_ones_own_is_listed_and_explained(forewarn: Call, place: Path) -> None:
    assert "Z101" not in forewarn("rules").out
    assert "Z101  high-loss" in forewarn("rules", "--rules", "my_rules").out
    listed = json.loads(forewarn("rules", "--json", "--rules", "my_rules.py").out)
    assert listed[-1] == {
        "code": "Z101",
        "name": "high-loss",
        "summary": "Loss above a limit.",
        "reads": ["train/loss"],
    }
    said = forewarn("explain", "high-loss", "--rules", "my_rules")
    assert said.code == 0
    assert "Z101 high-loss" in said.out
    assert "[thresholds.high_loss]" in said.out
    assert "The highest loss that is well." in said.out
    assert 'No rule is named "high-loss"' in forewarn("explain", "high-loss").out


@pytest.mark.parametrize("command", [["check", "run"], ["explain", "L102"], ["rules"], ["train", "lm"]])
def test_rules_that_cannot_be_loaded_are_one_sentence(forewarn: Call, place: Path, command: list[str]) -> None:
    said = forewarn(*command, "--rules", "nowhere")
    assert said.code == 3
    assert (
        said.err == "Error: the rules in 'nowhere' cannot be loaded: ModuleNotFoundError: No module named 'nowhere'\n"
    )


def test_a_training_of_the_command_line_is_judged_by_them_too(forewarn: Call, place: Path) -> None:
    tiny = ["--width", 16, "--depth", 1, "--heads", 2, "--context", 16, "--batch-size", 4, "--max-steps", 3]
    source = (place / "my_rules.py").read_text()
    (place / "my_rules.py").write_text(source.replace("10.0", "0.001"))
    assert forewarn("train", "lm", *tiny, "--rules", "my_rules").code == 0
    assert [alert.code for alert in public.open_run("results/lm/run").alerts()] == ["Z101"]
