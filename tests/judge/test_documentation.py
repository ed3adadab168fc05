"""The pages about the rules are those of the rules that there are."""

import subprocess
import sys
from pathlib import Path

import pytest

from forewarn.judge.documentation import field_docs, render_index, render_rule, write_docs
from forewarn.judge.rules import all_rules, find_rule
from forewarn.judge.rules.gradients import GradientSpike
from forewarn.judge.rules.loss import LossSpike

FOLDER = Path(__file__).parents[2] / "docs" / "rules"
AGAIN = "run `python -m forewarn.judge.documentation docs/rules`"


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
def test_its_page_is_fresh(rule):
    assert (FOLDER / f"{rule.name}.md").read_text(encoding="utf-8") == render_rule(rule), AGAIN


def test_the_index_is_fresh_and_there_are_no_other_pages():
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == render_index(all_rules()), AGAIN
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *(rule.name for rule in all_rules())}, AGAIN


def test_a_page_says_everything_there_is_to_know():
    page = render_rule(find_rule("L102"))
    assert page.startswith("# L102 loss-spike\n")
    assert "```\nfires: 2.0+0.001x150 9.0 9.0\n" in page
    assert "[How to read this](README.md#how-to-read-the-examples)." in page
    assert "| fires | as soon as its thresholds are met |" in page
    assert "| fires | after 16 checks in a row |" in render_rule(find_rule("L103"))
    assert "| resolves after | 50 steps without it |" in page
    assert "| `warning_factor` | 10 | Times the recent level at which a single step is a warning. |" in page
    assert "1. **Lower the learning rate from 0.001 to 0.0005** *(opt in)*. " in page


def test_advice_for_one_cause_names_it():
    page = render_rule(find_rule("U101"))
    assert "** where the cause is `rounded_away`. " in page


def test_a_field_without_a_docstring_has_that_of_its_base():
    assert field_docs(GradientSpike)["floor"] == field_docs(LossSpike)["floor"]


def test_pages_of_rules_that_are_no_more_are_taken_away(tmp_path):
    (tmp_path / "gone.md").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    write_docs(tmp_path)
    assert not (tmp_path / "gone.md").exists()
    assert (tmp_path / "notes.txt").exists()


def test_the_command_writes_them(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "forewarn.judge.documentation", str(tmp_path / "new")]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert len(written) == len(all_rules()) + 1
    assert subprocess.run(command[:-1], capture_output=True, check=False).returncode == 1
