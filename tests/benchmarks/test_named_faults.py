"""The comparison of what tools say: how their words are scored, and what the page makes of the scores."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.named_faults.__main__ import command
from benchmarks.named_faults.faults import FAULTS
from benchmarks.named_faults.page import QUOTE, Comparison, from_json, page, quoted, table
from benchmarks.named_faults.scoring import MEANINGS, Remark, Said, mentioned, telling, verdict
from benchmarks.named_faults.tools import TOOLS, Forewarn
from forewarn.lab.bench.measurements import Machine

ROOT = Path(__file__).parents[2]

CAUSE = Remark("leftover warning", "Gradients pile up: zero_grad() is missing")
SYMPTOM = Remark("spike warning", "The gradient norm is large", more="Or zero_grad was forgotten.")
PATTERN = FAULTS["zero-grad"].pattern


def test_a_warning_that_matches_names_the_cause():
    assert verdict(PATTERN, [SYMPTOM, CAUSE], []) == "names the cause"
    assert telling(PATTERN, [SYMPTOM, CAUSE], []) == [CAUSE]
    assert not mentioned(PATTERN, [SYMPTOM, CAUSE], [])


def test_a_warning_that_does_not_match_tells_a_symptom_even_if_its_longer_text_lists_the_cause():
    assert verdict(PATTERN, [SYMPTOM], []) == "warns, other words"
    assert telling(PATTERN, [SYMPTOM, Remark(SYMPTOM.kind, "again")], []) == [SYMPTOM]
    assert mentioned(PATTERN, [SYMPTOM], [])
    assert not mentioned("labels", [SYMPTOM], [])


def test_a_kind_of_warning_that_the_healthy_twin_gets_counts_for_nothing():
    elsewhere = Remark(CAUSE.kind, "Gradients pile up in another layer")
    assert verdict(PATTERN, [CAUSE], [elsewhere]) == "silent"
    assert telling(PATTERN, [CAUSE], [elsewhere]) == []
    assert verdict(PATTERN, [Remark("leftover critical", CAUSE.text)], [elsewhere]) == "names the cause"
    assert verdict(PATTERN, [], []) == "silent"


def test_only_recorders_are_not_scored():
    assert {name for name, tool in TOOLS.items() if not tool.judges} == {"wandb", "TensorBoard"}


SENTENCES = {
    "zero-grad": ("gradients accumulate: call optimizer.zero_grad()", "exploding gradients"),
    "never-stepped": ("the optimizer did not step", "stagnant weight norms: layers may not be learning"),
    "left-out": ("fc2.weight is missing from the optimizer", "fc2 does not learn"),
    "detached": ("no gradient flow to 2 trainable modules", "vanishing signal"),
    "rate-jump": ("the LR jumped to 0.03", "weights are changing too aggressively"),
    "rate-small": ("increase the learning rate", "loss not moving in first 100 steps"),
    "nan-batch": ("NaN in the input of step 181", "NaN detected in 7 modules"),
    "large-init": ("grad_explosion: 3 modules", "objective explosion at step 3"),
    "vanishing": ("gradients vanishing by depth", "gradient norm below 1e-8"),
    "dead-relus": ("dying_relu: 100% of the units are dead", "representations are collapsing"),
    "overfitting": ("the validation loss is rising", "loss ended 40% above its minimum"),
    "starved-task": ("task place has almost no influence", "depth 2 holds 99% of all gradients"),
    "eval-mode": ("BatchNorm is in evaluation mode", "add batch normalization"),
    "attention": ("attention entropy collapsed", "activation saturation"),
    "softmax-twice": ("softmax is applied twice", "loss plateau"),
    "wrong-labels": ("labels do not belong to the inputs", "loss plateau"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_pattern_of_a_fault_tells_its_cause_from_a_symptom(fault):
    cause, symptom = (Remark("some check", text) for text in SENTENCES[fault])
    assert verdict(FAULTS[fault].pattern, [cause], []) == "names the cause"
    assert verdict(FAULTS[fault].pattern, [symptom], []) == "warns, other words"


def test_forewarn_names_a_fault_of_a_real_run_and_not_of_its_twin(tmp_path, capsys):
    said = []
    for name, build in (("twin", FAULTS["zero-grad"].twin), ("broken", FAULTS["zero-grad"].build)):
        torch.manual_seed(0)
        loop = build()
        loop.steps = 12
        tool = Forewarn()
        tool.attach(loop.model, loop.optimizer, tmp_path / name)
        assert len(loop.train(tool)) == 12
        said.append(tool.report()[0])
    assert said[0] == []
    assert verdict(PATTERN, said[1], said[0]) == "names the cause"
    assert "zero_grad" in capsys.readouterr().err


def comparison(remarks_by_seed):
    fault = FAULTS["zero-grad"]
    said = {}
    for seed, remarks in enumerate(remarks_by_seed):
        said["forewarn", fault.build.__name__, seed] = Said(tuple(remarks), "report", "console")
        said["forewarn", fault.twin.__name__, seed] = Said((), "", "")
    said["wandb", fault.build.__name__, 0] = Said((), "recorded", "")
    return Comparison(["forewarn", "wandb"], ["zero-grad"], len(remarks_by_seed), said)


def test_a_cell_shows_the_verdict_of_most_seeds_and_how_many_agree():
    *_, row = table(comparison([[CAUSE], [CAUSE], []]))
    assert row == "| `zero_grad()` forgotten | **names the cause** (2 of 3) | not its job |"
    *_, row = table(comparison([[SYMPTOM], [SYMPTOM], [SYMPTOM]]))
    assert "| warns, other words ¹ |" in row


def test_the_page_explains_its_words_and_keeps_what_was_said():
    machine = Machine("a processor", 2, 10**9, 0.5, "2026-01-01", {"forewarn": "0.1.0"})
    result = comparison([[CAUSE]])
    text = page("python -m benchmarks.named_faults", machine, result, "compared.json")
    assert all(f"- **{word}**: {meaning}" in text for word, meaning in MEANINGS.items())
    assert "forewarn: `Gradients pile up: zero_grad() is missing`" in text
    assert "| forewarn | 1 | 0 | 0 | 0 of 1 | none |" in text
    assert "forewarn 0.1.0" in text
    assert from_json(json.loads(json.dumps(result.as_json()))) == result.said


def test_stored_runs_are_scored_again_without_training(tmp_path, capsys):
    result = comparison([[CAUSE]])
    (tmp_path / "compared.json").write_text(json.dumps(result.as_json()))
    chosen = ["--tools", "forewarn,wandb", "--faults", "zero-grad", "--seeds", "1"]
    command.main([*chosen, "--again", str(tmp_path / "compared.json")], standalone_mode=False)
    said = capsys.readouterr()
    assert said.out.splitlines() == list(table(result))
    assert said.err == ""  # a run that trains is told there


def test_a_quote_is_one_line_that_markdown_leaves_alone():
    assert quoted("call `step()`\n now | <b>") == "`call 'step()' now | <b>`"
    assert len(quoted("long " * 200)) == QUOTE + 2


def test_the_page_in_the_docs_has_every_fault_and_tool():
    text = (ROOT / "docs" / "compared.md").read_text()
    assert f"| fault | {' | '.join(TOOLS)} |" in text
    for fault in FAULTS.values():
        assert f"\n| {fault.title} | " in text
