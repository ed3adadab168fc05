"""What a finding says in one sentence."""

import math

import pytest

from forewarn.judge.headlines import headline
from forewarn.judge.rules import find_rule
from forewarn.types import Finding, Severity


def said(name, value, bound, scope="", **evidence):
    rule = find_rule(name)
    return headline(rule, Finding(rule.code, scope, 7, Severity.WARNING, value, bound, evidence))


def test_a_spike_is_told_with_its_level():
    assert said("loss-spike", 9.0, 2.3, level=2.0653, ratio=4.35772, lasting_steps=1.0) == (
        "The training loss is 4.36 times its recent level (loss 9, usually 2.07)."
    )


def test_a_finding_with_other_evidence_is_told_by_the_message_that_it_has_the_keys_of():
    assert said("loss-spike", 5.0, -1.4, level=-2.0, gained=1.0, lasting_steps=1.0) == (
        "The training loss is 5, far above its recent level of -2 (limit -1.4)."
    )


def test_a_scope_makes_a_difference():
    assert "ratio of layer.weight is 0.2" in said("update-ratio-high", 0.2, 0.1, "layer.weight")
    assert "median update/weight ratio is 0.2" in said("update-ratio-high", 0.2, 0.1)
    assert said("parameter-not-in-optimizer", 2.0, math.nan).startswith("the model is trainable")


def test_what_is_missing_is_unknown():
    assert said("non-finite-loss", math.nan, 0.0, last_finite=math.nan) == (
        "The training loss is not a finite number (last finite loss unknown)."
    )
    assert "limit unknown" in said("exploding-gradient", 150.0, math.nan)


def test_the_name_of_a_cause_is_in_words_and_that_of_a_layer_as_it_is():
    assert said("frozen-weight", 0.0, 0.0, "my_layer.weight", cause="zero_gradient") == (
        "my_layer.weight does not move (cause: zero gradient)."
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (123456.7, "123000"), (1234.5, "1230"), (999.96, "1000"), (12345.0, "12345"), (0.000123456, "0.000123"),
        (1.234e-7, "1.23e-7"), (2.5e9, "2.5e+9"), (math.inf, "∞"), (-3.0, "-3"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits_and_counts_all(value, words):
    assert f"is {words} (limit 1)" in said("exploding-gradient", value, 1.0)
