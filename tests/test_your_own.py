"""docs/your_own.md as a newcomer follows it: save the files, train, check, ship."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.judge.rules import contract
from tests.test_documentation import YOUR_OWN, blocks, files_of

MOST_LINES = 25
FILES = files_of(YOUR_OWN)


@pytest.fixture
def place(tmp_path):
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def run(place, *command):
    """A command in a process of its own; what it printed."""
    return subprocess.run([sys.executable, *command], cwd=place, capture_output=True, text=True, check=False)


def forewarn(place, *arguments):
    return run(place, "-m", "forewarn", *arguments)


def test_a_rule_and_a_probe_take_at_most_25_lines():
    assert FILES.keys() == {"my_rules.py", "my_probes.py", "train.py"}
    assert max(len(code.splitlines()) for code in FILES.values()) <= MOST_LINES
    assert all(len(line) <= 120 for code in FILES.values() for line in code.splitlines())


def test_a_metric_takes_one_line():
    assert re.findall(r"^WAITING = Metric\(.*\)$", FILES["my_probes.py"], re.MULTILINE)


def test_the_rule_keeps_the_contract_of_built_in_rules(place, monkeypatch):
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    from my_rules import long_step

    contract.reads_what_is_written(long_step)
    contract.speaks_only_of_new_readings(long_step)
    contract.message_fits(long_step)
    contract.reads_every_setting(long_step)
    for values in contract.strange_values().values():
        contract.bears_strange_values(long_step, values, ("",))
    del sys.modules["my_rules"]


def test_the_files_train_and_check_as_written(place):
    trained = run(place, "train.py")
    assert trained.returncode == 0, trained.stderr
    plain = json.loads(forewarn(place, "check", "runs/mine", "--rules", "my_rules", "--json").stdout)
    assert plain["not_judged"] == []
    without = json.loads(forewarn(place, "check", "runs/mine", "--json").stdout)
    assert without["not_judged"] == [{"code": "Z101", "name": "long-step"}]
    assert without["verdict"] != "healthy"
    assert "loader    waiting 0 batches" in forewarn(place, "show", "runs/mine").stdout


def test_the_entry_point_brings_the_rules_without_an_option(place):
    (block,) = blocks(YOUR_OWN, 'toml title="pyproject.toml"')
    ((group, names),) = tomllib.loads(block)["project"]["entry-points"].items()
    info = place / "my_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_rules\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in names.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}\n")
    assert "Z101  long-step" in forewarn(place, "rules").stdout
    assert "[thresholds.long_step]" in forewarn(place, "explain", "long-step").stdout
    assert run(place, "train.py").returncode == 0
    assert json.loads(forewarn(place, "check", "runs/mine", "--json").stdout)["not_judged"] == []


def test_the_config_of_the_page_sets_the_rule(place):
    (place / "forewarn.toml").write_text(blocks(YOUR_OWN, "toml")[0])
    assert run(place, "train.py").returncode == 0
    said = forewarn(place, "check", "runs/mine", "--config", "forewarn.toml", "--json")
    assert json.loads(said.stdout)["not_judged"] == [], said.stderr


def test_the_page_is_linked_where_people_look(place):
    root = Path(YOUR_OWN).parent.parent
    assert "(docs/your_own.md)" in (root / "README.md").read_text()
    assert "docs/your_own.md" in (root / "CONTRIBUTING.md").read_text()
    for command in ("rules", "explain"):
        assert "docs/your_own.md" in forewarn(place, command, "--help").stdout
