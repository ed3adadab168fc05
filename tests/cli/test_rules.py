"""`forewarn rules` and `forewarn explain`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from forewarn.judge.rules import Rule, all_rules
from forewarn.types import in_words
from forewarn.views.bars import BARS
from tests.cli.conftest import Said

Call = Callable[..., Said]


def test_every_rule_is_listed(forewarn: Call) -> None:
    said = forewarn("rules")
    assert said.code == 0
    for rule in all_rules():
        assert rule.code in said.out
        assert rule.name in said.out


def test_json_holds_every_rule(forewarn: Call) -> None:
    found = json.loads(forewarn("rules", "--json").out)
    assert [one["code"] for one in found] == [rule.code for rule in all_rules()]
    assert all(one["summary"] and one["reads"] for one in found)


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_a_rule_is_explained_by_code_and_by_name_with_its_thresholds(forewarn: Call, rule: Rule) -> None:
    said = forewarn("explain", rule.code)
    assert said.code == 0
    assert said == forewarn("explain", rule.name)
    assert f"{rule.code} {rule.name}" in said.out
    assert "Why is this bad?" in said.out
    if rule.settings is not None:
        for name, value in rule.settings().to_dict().items():
            assert any(line.split()[:2] == [name, in_words(value)] for line in said.out.splitlines())


def test_a_threshold_is_explained_also_where_it_is_inherited(forewarn: Call) -> None:
    said = forewarn("explain", "L102")
    assert "[thresholds.loss_spike]" in said.out
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert "lost_steps 20 Steps in a row after which the spike is critical: the loss is not coming" in lines
    assert "window 64 Number of accepted values in the level." in lines


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_examples_are_pictures_that_fit_in(
    forewarn: Call, monkeypatch: pytest.MonkeyPatch, rule: Rule, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = forewarn("explain", rule.code).out.splitlines()
    assert max(map(len, lines)) <= columns
    assert not [line for line in lines if "fires: " in line or "quiet: " in line]
    quiet, fires = lines.index("Stays quiet"), next(i for i, line in enumerate(lines) if " Fires at step " in line)
    for first, last in ((quiet, fires), (fires, len(lines))):
        assert set("".join(lines[first:last])) & set(BARS + "×")
        assert any(line.split()[:2] == ["step", "0"] for line in lines[first:last])


def test_a_picture_is_labelled_with_values_steps_and_what_the_alert_would_say(forewarn: Call) -> None:
    said = forewarn("explain", "loss-divergence").out
    assert "Fires at step 281  The training loss keeps rising" in said
    loss, axis = said[said.index("Fires at") :].splitlines()[1:3]
    assert re.fullmatch(r"  loss  ▁{20,30}[▂▃▄▅▆▇]+  2 → 4.98", loss)
    assert axis.split() == ["step", "0", "349"]
    assert "2 → 6 → 2" in said  # what comes back shows its peak
    assert "2 → NaN" in forewarn("explain", "non-finite-loss").out
    assert "it moves → its gradient is exactly zero" in forewarn("explain", "frozen-weight").out


def test_a_rule_names_its_guide_page_if_there_is_one(forewarn: Call) -> None:
    assert "docs/guide/nan-loss.md" in forewarn("explain", "non-finite-loss").out
    assert "docs/guide/" not in forewarn("explain", "store-failed").out


def test_a_terminal_that_knows_only_ascii_gets_pictures_in_ascii() -> None:
    for extra in ({}, {"FORCE_COLOR": "1"}):
        environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80", **extra}
        command = [sys.executable, "-m", "forewarn", "explain", "U104"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert ended.stdout.isascii()
        assert re.search("update ratio +_+#+  0.001 -> 0.03", ended.stdout)
        assert "?" not in ended.stdout.replace("Why is this bad?", "")


def test_no_color_is_heeded(forewarn: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    colour = re.compile(r"\x1b\[[\d;]*\b[34]\d")
    assert colour.search(forewarn("explain", "L101").out)
    monkeypatch.setenv("NO_COLOR", "1")
    for words in ("L101", "nan"):
        said = forewarn("explain", words)
        assert said.code == 0
        assert not colour.search(said.out)


@pytest.mark.parametrize("typed", ["loss-spikes", "los-spike", "Loss-Spikes", "loss_spike"])
def test_a_misspelled_rule_gets_a_suggestion(forewarn: Call, typed: str) -> None:
    said = forewarn("explain", typed)
    assert said.code == 3
    assert "did you mean 'loss-spike'?" in said.err


@pytest.mark.parametrize("words", [["loss not decreasing"], ["loss", "not", "decreasing"]])
def test_other_words_are_searched_for(forewarn: Call, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = forewarn("explain", *words)
    assert said.code == 0
    title, _, *hits, _, go_on = said.out.splitlines()
    assert '"loss not decreasing"' in title
    assert 2 < len(hits) <= 8
    assert all(re.match(r"([A-Z]\d{3}|page)  \S+ +\S", hit) and len(hit) <= 80 for hit in hits)
    assert go_on == "Next: forewarn explain loss-not-starting"
    assert any("docs/guide/loss-not-decreasing.md" in hit for hit in hits)


def test_a_question_without_a_rule_leads_to_its_page(forewarn: Call) -> None:
    assert "Next: read docs/guide/what-to-log.md" in forewarn("explain", "what to log").out


def test_what_is_nowhere_is_said_to_be_nowhere(forewarn: Call) -> None:
    said = forewarn("explain", "blue", "bananas")
    assert said.code == 3
    assert said.err.startswith("Error: no rule or page matches 'blue bananas'; try ")
    assert said.err.count("\n") == 1
