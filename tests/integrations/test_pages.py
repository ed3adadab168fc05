"""The code for other libraries in the documentation runs as pasted, section by section."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState

import forewarn

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: Path, section: str) -> list[str]:
    text = page.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("section", "run"), [("With Hugging Face", "first_hf"), ("With Lightning", "first_lightning")])
def test_the_first_alert_comes_in_other_libraries_too(section, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = code_of(DOCS / "first_alert.md", section)
    exec(code, {})
    with forewarn.open_run(f"runs/{run}") as stored:
        assert any("Lower the learning rate" in remedy.do for alert in stored.alerts() for remedy in alert.remedies)


@pytest.mark.parametrize(("section", "run", "num_steps"), [
    ("Hugging Face", "out/forewarn", 10),
    ("Lightning", "runs/exp1", 20),
    ("Accelerate", "runs/exp1", 10),
])  # fmt: skip
def test_the_code_of_a_section_runs(section, run, num_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in code_of(DOCS / "integrations.md", section):
        exec(compile(code, section, "exec"), names)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "monitor" in names:
        names["monitor"].close()
    with forewarn.open_run(run) as stored:
        assert stored.num_steps == num_steps
