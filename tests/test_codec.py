"""Every shared noun as plain values and back, by the one codec."""

from __future__ import annotations

import json
import math
import re

import pytest

from forewarn.types import (
    Action,
    Alert,
    AlertState,
    Finding,
    Outcome,
    ParameterInfo,
    Remedy,
    RunInfo,
    Severity,
)

FINDING = Finding("G201", "blocks.0", 7, Severity.CRITICAL, math.inf, 0.5, {"ratio": 2, "cause": "zero lr"})
REMEDY = Remedy("lower_lr", {"from": 3e-4, "group": "all"}, "the loss rises", "opt_in")
ALERT = Alert(
    "G201", "exploding-gradient", "", Severity.WARNING, AlertState.FIRING, 1, 2, 9, FINDING, (REMEDY,), FINDING
)
ACTION = Action(7, "L102", "", "stop", {"count": 1})
INFO = RunInfo(
    model="GPT",
    parameters={"a.weight": ParameterInfo((2, 3), "Linear.weight", "float32", None, True)},
    blocks=("a", "b"),
    groups=({"lr": 1e-3},),
    hyperparameters={"dropout": None, "widths": [1, 2]},
    metrics={"user/x": (-math.inf, 1.0)},
)


@pytest.mark.parametrize("enums", [str, int])
@pytest.mark.parametrize("noun", [FINDING, REMEDY, ALERT, ACTION, INFO, Outcome((ALERT,), (ACTION,))])
def test_every_noun_comes_back_from_json_as_it_was(noun, enums):
    assert type(noun).from_json(json.loads(json.dumps(noun.to_json(enums)))) == noun


def test_enums_are_words_unless_numbers_are_asked_for():
    words, numbers = ALERT.to_json(), ALERT.to_json(enums=int)
    assert (words["severity"], words["state"], words["finding"]["severity"]) == ("warning", "firing", "critical")
    assert (numbers["severity"], numbers["state"], numbers["finding"]["severity"]) == (2, 1, 3)


def test_a_missing_field_has_its_default_and_an_unknown_one_is_left_out():
    plain = {**ALERT.to_json(), "mood": "grim"}
    del plain["announced"], plain["remedies"]
    read = Alert.from_json(plain)
    assert (read.announced, read.remedies, read.finding) == (None, (), FINDING)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"code": 3}, "code must be str, not 3"),
        ({"last": "soon"}, "last must be int, not 'soon'"),
        ({"finding": None}, "finding must be dict, not None"),
        ({"remedies": 3}, "remedies must be tuple, not 3"),
        ({"severity": 17}, "severity has the unknown value 17: it is damaged or from a newer version"),
        ({"state": "dozing"}, "state has the unknown value 'dozing': it is damaged or from a newer version"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_sentence(change, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Alert.from_json({**ALERT.to_json(), **change})
