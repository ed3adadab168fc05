"""The examples for other libraries run with the real ones, and record what they train."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from accelerate.state import AcceleratorState, GradientState

import forewarn

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "run", "num_steps"), [
    ("huggingface_trainer", "forewarn", 60), ("lightning_trainer", "", 84), ("accelerate_loop", "", 64),
])  # fmt: skip
def test_an_example_trains_and_is_healthy(name, run, num_steps, tmp_path):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](tmp_path / "here")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with forewarn.open_run(tmp_path / "here" / run) as stored:
        assert stored.num_steps == num_steps
        losses = stored.series("train/loss").values
        assert losses[-10:].mean() < 0.6 * losses[:5].mean()
        assert [alert.name for alert in stored.alerts() if alert.severity > forewarn.Severity.INFO] == []
