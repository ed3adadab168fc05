"""The code in docs/integrations.md runs as pasted, section by section."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState

import forewarn

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.mark.parametrize(("section", "run", "num_steps"), [
    ("Hugging Face", "out/forewarn", 10),
    ("Lightning", "runs/exp1", 20),
    ("Accelerate", "runs/exp1", 10),
])  # fmt: skip
def test_the_code_of_a_section_runs(section, run, num_steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, str(PAGE), "exec"), names)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "monitor" in names:
        names["monitor"].close()
    with forewarn.open_run(run) as stored:
        assert stored.num_steps == num_steps
