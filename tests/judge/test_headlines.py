"""What a finding says in words."""

import math

import pytest

from forewarn.judge.headlines import Message, place, tell
from forewarn.judge.rules import find_rule
from forewarn.types import Finding, FrozenCause, RunInfo, Severity, figure, figures

INFO = RunInfo(modules={"2": "Linear", "layers.0.1": "ReLU", "0.1": "ReLU"})


def found(value, bound, scope="", **evidence):
    return Finding("L102", scope, 7, Severity.WARNING, value, bound, evidence)


def said(name, value, bound, scope="", **evidence):
    return tell(find_rule(name).messages, found(value, bound, scope, **evidence), INFO)


def test_a_spike_is_told_with_its_numbers():
    told = said("loss-spike", 9.0, 2.3, level=2.0653, ratio=4.35772, lasting_steps=1.0)
    assert told.headline == "The training loss is 4.36× its usual level"
    assert told.numbers == "loss 9 · limit 2.3 · usual 2.07"
    assert told.cause == ""


def test_a_finding_with_other_evidence_is_told_by_the_message_that_it_has_the_keys_of():
    told = said("loss-spike", 5.0, -1.4, level=-2.0, gained=1.0, lasting_steps=1.0)
    assert told.headline == "The training loss is far above its usual level"
    assert told.numbers == "loss 5 · limit -1.4 · usual -2"


def test_a_cause_that_the_evidence_tells_is_told():
    told = said("update-ratio-jump", 0.46, 0.046, level=0.015, ratio=30.0, lr_before=0.001, lr_after=0.03)
    assert told.cause == "the learning rate went from 0.001 to 0.03"
    assert said("update-ratio-jump", 0.46, 0.046, level=0.015, ratio=30.0).cause == ""


def test_the_name_of_a_cause_is_in_its_words():
    told = said("frozen-weight", 0.0, 1e-9, "my_layer.weight", cause="zero_gradient")
    assert "my_layer.weight" in told.headline
    assert told.cause == str(FrozenCause.ZERO_GRADIENT)


def test_what_is_unknown_is_left_out_of_the_numbers():
    message = Message("It is high", "loss {value} · limit {bound} · usual {level} · earlier {before}")
    told = tell([message], found(math.nan, math.nan, level=2.0))
    assert told.numbers == "loss NaN · usual 2"


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("2.weight", "layer 2 (Linear) weight"), ("2", "layer 2 (Linear)"), ("0.1", "layer 0.1 (ReLU)"),
        ("3.weight", "3.weight"), ("layers.0.1", "layers.0.1"), ("head.bias", "head.bias"), ("", ""),
    ],
)  # fmt: skip
def test_a_layer_that_has_only_a_number_is_named_by_its_kind(scope, name):
    assert place(scope, INFO) == name
    assert place(scope) == scope


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (123456.7, "123000"), (1234.5, "1230"), (999.96, "1000"), (12345.0, "12345"), (0.000123456, "0.000123"),
        (1.234e-7, "1.23e-7"), (2.5e9, "2.5e+9"), (math.inf, "∞"), (-3.0, "-3"), (math.nan, "NaN"),
    ],
)  # fmt: skip
def test_numbers_have_three_significant_digits_and_counts_all(value, words):
    assert figure(value) == words
    assert tell([Message("{value}")], found(value, 1.0)).headline == words


def test_shares_are_percentages():
    assert [tell([Message("{value:%}")], found(share, 1.0)).headline for share in (0.29, 1.0, 0.0003, 0.12345)] == [
        "29%", "100%", "0.03%", "12.3%",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((2.314, 2.306), ["2.314", "2.306"]),
        ((5.0, 1.0), ["5", "1"]),
        ((1234.1, 1234.4), ["1234.1", "1234.4"]),
        ((1.0, 1.0), ["1", "1"]),
        ((5e-324, 1.0), ["4.94e-324", "1"]),
    ],
)
def test_numbers_side_by_side_have_the_digits_that_tell_them_apart(values, words):
    assert figures(*values) == words


def test_numbers_beyond_what_people_read_are_told_as_limits():
    message = Message("It fell to {value:%} and rose {ratio:×}")
    assert tell([message], found(3.28e-19, 0.0, ratio=4.96e9)).headline == (
        "It fell to less than 0.001% and rose over a million×"
    )
    assert tell([message], found(0.0328, 0.0, ratio=4.96)).headline == "It fell to 3.28% and rose 4.96×"
    assert tell([message], found(0.0, 0.0, ratio=math.inf)).headline == "It fell to 0% and rose ∞×"
