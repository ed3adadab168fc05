"""What is found for the words that a person types."""

from __future__ import annotations

from pathlib import Path

import pytest

from forewarn.judge.rules import all_rules
from forewarn.judge.search import MOST_HITS, is_misspelled, search, stem
from forewarn.judge.symptoms import SYMPTOMS, SYNONYMS, guides_of
from forewarn.suggestions import words_in

REPOSITORY = Path(__file__).parents[2]
QUERIES = {
    "nan": "non-finite-loss",
    "loss is nan": "non-finite-loss",
    "loss becomes NaN after a few steps": "non-finite-loss",
    "inf": "non-finite-loss",
    "why does my loss go to infinity?": "non-finite-loss",
    "NaN gradients": "non-finite-gradient",
    "weights are nan": "non-finite-weight",
    "loss not decreasing": "loss-not-starting",
    "loss does not go down": "loss-not-starting",
    "my model isn't learning": "loss-not-starting",
    "loss is flat": "loss-plateau",
    "training loss stuck": "loss-plateau",
    "loss stopped improving": "loss-plateau",
    "plateau": "loss-plateau",
    "validation goes up": "validation-rising",
    "val loss increasing": "validation-rising",
    "validation loss increases while training loss decreases": "overfitting",
    "overfit": "overfitting",
    "model does not generalize": "overfitting",
    "underfitting": "underfitting",
    "model too small": "underfitting",
    "loss spikes": "loss-spike",
    "loss suddenly jumps": "loss-spike",
    "loss diverges": "loss-divergence",
    "loss blows up": "loss-divergence",
    "loss oscillates": "loss-bouncing",
    "noisy loss": "loss-bouncing",
    "exploding gradients": "exploding-gradient",
    "gradient explosion": "exploding-gradient",
    "gradients too large": "exploding-gradient",
    "gradiant explodng": "exploding-gradient",
    "vanishing gradients": "vanishing-gradient",
    "gradients are zero": "vanishing-gradient",
    "gradients disappear": "vanishing-gradient",
    "gradient is None": "missing-gradient",
    "my loss explodes": "exploding-gradient",
    "not converging": "loss-not-starting",
    "early layers do not learn": "gradient-fades-with-depth",
    "forgot zero_grad": "accumulating-gradient",
    "forgot optimizer.step": "optimizer-not-stepping",
    "weights not changing": "frozen-weight",
    "layer does not train": "frozen-weight",
    "requires_grad": "frozen-weight",
    "detach": "missing-gradient",
    "lr too high": "update-ratio-high",
    "learning rate too small": "update-ratio-low",
    "bf16 precision": "update-ratio-low",
    "warmup": "warm-up-without-end",
    "resume from checkpoint learning rate": "lr-jump-on-resume",
    "dead relu": "dead-units",
    "dying neurons": "dead-units",
    "tanh saturated": "saturated-units",
    "batch norm": "batchnorm-in-eval",
    "attention collapse": "attention-entropy-collapse",
    "mixture of experts": "dead-expert",
    "multitask": "task-imbalance",
    "one task dominates": "task-collapse",
    "disk full": "store-failed",
    "oom": "out-of-memory",
    "CUDA out of memory": "out-of-memory",
    "memory leak": "memory-leak",
    "training is slow": "throughput-drop",
    "slow data loader": "data-starved",
    "run hangs": "stalled-run",
    "gpu idle": "gpu-underused",
}
"""What people type, and what must be among the first three."""


@pytest.mark.parametrize("query", QUERIES)
def test_what_a_person_types_leads_to_the_rule(query: str) -> None:
    names = [hit.name for hit in search(query)]
    assert QUERIES[query] in names[:3], names
    assert len(names) <= MOST_HITS


@pytest.mark.parametrize("query", QUERIES)
def test_it_is_found_without_the_documentation_as_in_an_installed_package(query: str, tmp_path: Path) -> None:
    assert QUERIES[query] in [hit.name for hit in search(query, repository=tmp_path)][:3]


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_every_rule_is_found_by_the_words_of_its_name_and_by_its_summary(rule: object) -> None:
    for query in (rule.name.replace("-", " "), rule.summary):
        assert rule.name in [hit.name for hit in search(query)][:3], query


def test_pages_are_found_by_their_titles() -> None:
    pages = {"rules of your own": "docs/your_own.md", "coordinate check": "docs/coordinate_check.md"}
    for query, page in pages.items():
        assert page in [hit.name for hit in search(query)][:3]


@pytest.mark.parametrize("query", ["", " ", "xyzzy", "blue bananas", "the of and", "?", "\x1b[31m", "🦜", "x" * 50_000])
def test_nothing_is_found_where_there_is_nothing(query: str) -> None:
    assert search(query) == []


def test_a_long_story_is_searched_too() -> None:
    story = "I trained my model for three days and since this morning the loss is NaN, what should I do? " * 50
    assert "non-finite-loss" in [hit.name for hit in search(story)][:3]


def test_words_of_a_project_do_not_hide_a_symptom_but_noise_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "docs" / "rules").mkdir(parents=True)
    (tmp_path / "docs" / "rules" / "README.md").touch()
    (tmp_path / "docs" / "page.md").write_text("# Healthy ranges and red flags\n")
    assert search("resnet50 cifar10 nan", repository=tmp_path)[0].name == "non-finite-loss"
    assert search("red flags", repository=tmp_path)[0].name == "docs/page.md"
    assert search("x[red]y[/red]\x1b]0;y\x07\x9b31m\u202e", repository=tmp_path) == []


def test_pages_that_are_not_ours_are_not_searched(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "zebra.md").write_text("# Zebras\n")
    assert search("zebras", repository=tmp_path) == []


def test_a_name_with_a_slip_in_it_is_not_searched_for_but_words_are() -> None:
    assert all(map(is_misspelled, ("loss-spikes", "overfiting", "L199", "vanishing-gradients")))
    assert not any(map(is_misspelled, ("nan", "exploding gradients", "plateau", "oom", "gradients", "")))


@pytest.mark.parametrize(
    "forms",
    ["explode exploding explodes exploded", "loss losses", "overfit overfitting", "rise rises rising", "spike spikes",
     "gradient gradients", "decrease decreasing decreases", "stop stopped stopping", "learn learning learns"],
)  # fmt: skip
def test_forms_of_a_word_are_one(forms: str) -> None:
    assert len(set(map(stem, forms.split()))) == 1


def test_symptoms_name_rules_that_exist_and_pages_of_the_guide() -> None:
    names = {rule.name for rule in all_rules()}
    assert {name for symptom in SYMPTOMS for name in symptom.rules} <= names
    assert len({symptom.page for symptom in SYMPTOMS}) == len(SYMPTOMS) == 10
    guide = REPOSITORY / "docs" / "guide"
    assert not guide.exists() or all((REPOSITORY / symptom.path).exists() for symptom in SYMPTOMS)


def test_the_guide_that_explains_a_rule_best_comes_first() -> None:
    assert [symptom.page for symptom in guides_of("loss-plateau")] == ["plateau", "loss-not-decreasing"]
    assert guides_of("store-failed") == []


def test_every_synonym_stands_for_a_word_that_is_used() -> None:
    told = " ".join(f"{rule.name} {rule.documentation} {rule.messages}" for rule in all_rules())
    told += " ".join(f"{symptom.title} {symptom.page}" for symptom in SYMPTOMS)
    used = set(map(stem, words_in(told)))
    assert not [word for words in SYNONYMS.values() for word in words.split() if stem(word) not in used]
