"""What holds for every rule, and that each clause of it can fail."""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest

from forewarn.config import Thresholds, check_tables
from forewarn.judge.chains import Episode, Episodes, chains_of
from forewarn.judge.documentation import sample_remedies
from forewarn.judge.examples import examples
from forewarn.judge.families import Family, Phase
from forewarn.judge.headlines import Message
from forewarn.judge.history import History
from forewarn.judge.registry import Rule, finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.rules import all_rules, find_rule
from forewarn.judge.series import Panel, Series
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity
from tests.judge.rules import contract
from tests.judge.rules.runs import fired

EXAMPLES = [
    pytest.param(rule.code, example, id=f"{rule.code}-{number}")
    for rule in all_rules()
    for number, example in enumerate(examples(rule))
]
FILES = sorted({contract.source_of(rule) for rule in all_rules()})
WITH_SETTINGS = [rule for rule in all_rules() if rule.settings is not None]

every_rule = pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.code)
every_rule_with_settings = pytest.mark.parametrize("rule", WITH_SETTINGS, ids=lambda rule: rule.code)


def test_all_rules_of_a_file_are_of_one_family():
    for path in FILES:
        assert len({rule.family for rule in all_rules() if contract.source_of(rule) == path}) == 1, path


def test_no_family_is_without_rules_and_every_letter_is_its_own():
    assert {rule.family for rule in all_rules()} == set(Family) - {Family.OWN}
    assert len({family.letter for family in Family}) == len(Family)
    assert all(rule.code.startswith(rule.family.letter) for rule in all_rules())


@every_rule
def test_it_explains_only_other_rules(rule):
    assert all(find_rule(code).code != rule.code for code in rule.explains)


@every_rule
def test_it_reads_what_somebody_writes(rule):
    contract.reads_what_is_written(rule)


@every_rule
def test_it_advises_something_with_numbers(rule):
    remedies = [remedy for remedy, _ in sample_remedies(rule)]
    assert remedies
    assert any(re.search(r"\d", str(remedy)) for remedy in remedies)
    for remedy in remedies:
        assert re.fullmatch(r"[a-z]+[a-z0-9]*(_[a-z0-9]+)*", remedy.action)
        assert remedy.why
        assert remedy.safety in ("notify", "safe", "opt_in")


@every_rule
def test_its_advice_copes_with_a_run_that_nothing_is_known_of(rule):
    for evidence in ({}, {"ratio": math.nan, "lasting_steps": 3}, {"ratio": math.inf, "lr_before": 0.0}):
        seen = Finding(rule.code, "", 0, Severity.WARNING, math.nan, math.inf, evidence)
        for make in rule.remedies:
            remedy = make(seen, History(), RunInfo())
            assert remedy is None or str(remedy)


@pytest.mark.parametrize(("code", "example"), EXAMPLES)
def test_its_examples_hold(code, example):
    assert fired(example, code) == example.fires, example.text


@every_rule
@pytest.mark.parametrize(
    "values", [pytest.param(values, id=name) for name, values in contract.strange_values().items()]
)
@pytest.mark.parametrize(
    "scopes",
    [contract.SCOPES, ("",), ("", *contract.SCOPES[1:]), ()],
    ids=["tensors", "run", "both", "none"],
)
def test_nothing_makes_it_raise(rule, values, scopes):
    contract.bears_strange_values(rule, values, scopes)


@pytest.mark.parametrize("rule", [rule for rule in all_rules() if rule.gate], ids=lambda rule: rule.code)
@pytest.mark.parametrize("scopes", [contract.SCOPES, ("",), ("", *contract.SCOPES[1:]), (*contract.SCOPES[1:], "")])
def test_its_gate_hides_nothing(rule, scopes):
    for values in contract.strange_values().values():
        contract.gate_hides_nothing(rule, values, scopes)
    rising = np.geomspace(1e-4, 1e4, 100, dtype=np.float32)[:, None]
    contract.gate_hides_nothing(rule, rising.repeat(len(scopes), axis=1), scopes)


@every_rule
@pytest.mark.parametrize("value", [0.0, 1e-9, 1.0, 1e9, math.nan])
def test_a_missing_companion_does_not_make_it_raise(rule, value):
    contract.bears_missing_companions(rule, value)


@every_rule
def test_it_speaks_only_of_new_readings(rule):
    contract.speaks_only_of_new_readings(rule)


@pytest.mark.parametrize("code", sorted(contract.SAID_ONCE | contract.JUDGED_OVER_A_COURSE))
def test_a_rule_that_is_exempt_from_that_has_to_be(code):
    with pytest.raises(AssertionError, match=r"takes an old reading for a new one|was not read"):
        contract.speaks_only_of_new_readings(find_rule(code), exempt=())


@every_rule
def test_its_evidence_is_numbers_or_names(rule):
    for example in examples(rule):
        for seen in contract.findings_of(rule, example):
            for name, value in seen.evidence.items():
                assert re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name)
                assert isinstance(value, int | float | str)


@every_rule
def test_its_message_fits_what_it_finds(rule):
    contract.message_fits(rule)


@every_rule
def test_its_remedies_say_what_to_do(rule):
    contract.remedies_fit(rule)


@every_rule_with_settings
def test_it_reads_every_one_of_its_settings(rule):
    contract.reads_every_setting(rule)


@every_rule_with_settings
def test_its_settings_say_what_they_count(rule):
    contract.says_what_its_settings_count(rule.settings)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_number_of_a_rule_hides_outside_its_settings(path):
    contract.numbers_are_settings(path.read_text())


def test_explanations_of_one_step_never_go_in_circles():
    episodes = [Episode(rule.code, rule.family.phase, 5, 5, 50, Severity.WARNING) for rule in all_rules()]
    known = Episodes()
    for episode in episodes:
        known.add(episode)
    codes = {episode.code: [rule.code for rule in all_rules() if episode.code in rule.explains] for episode in episodes}
    chains = chains_of(episodes, known, codes)
    for root, depth in chains.values():
        assert chains[root] == (root, 0)
        assert depth < len(episodes)


def test_a_step_meets_the_phases_in_this_order():
    assert sorted(Phase) == [
        Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE, Phase.WEIGHTS, Phase.REST,
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TooHigh(Settings):
    """When a made-up rule fires."""

    limit: float = between(10.0, 0.0)
    """The highest loss that is well."""


def too_high(loss: Series, settings: TooHigh) -> Finding | None:
    """Loss above a limit.

    ## Why is this bad?
    It is made up.

    ## Example
    fires: 1.0x3 20.0
    quiet: 1.0x3
    """
    return finding(Severity.WARNING, loss.last, settings.limit) if loss.last > settings.limit else None


SOUND = Rule(
    code="L900", name="too-high", family=Family.LOSS, reads=("train/loss",), when=("train/loss",), check=too_high,
    settings=TooHigh, messages=(Message("The loss is too high", "loss {value} · limit {bound}"),),
    remedies=(advise("look", "Look", "it is made up"),),
)  # fmt: skip


def documented(check):
    """The same rule by another check."""
    check.__doc__ = too_high.__doc__
    return dataclasses.replace(SOUND, check=check)


def test_a_sound_rule_keeps_every_clause():
    contract.reads_what_is_written(SOUND)
    contract.speaks_only_of_new_readings(SOUND)
    contract.message_fits(SOUND)
    contract.remedies_fit(SOUND)
    contract.reads_every_setting(SOUND)
    contract.says_what_its_settings_count(TooHigh)


def test_a_rule_that_speaks_of_an_old_reading_is_noticed():
    def highest_so_far(loss: Series, settings: TooHigh) -> Finding | None:
        seen = loss.finite()
        return finding(Severity.WARNING, seen.max(), settings.limit) if max(seen, default=0) > settings.limit else None

    with pytest.raises(AssertionError, match="takes an old reading for a new one"):
        contract.speaks_only_of_new_readings(documented(highest_so_far))


def test_a_rule_that_speaks_of_what_was_not_read_is_noticed():
    def any_scope(losses: Panel, settings: TooHigh) -> Iterator[Finding]:
        """Loss of a layer above a limit.

        ## Why is this bad?
        It is made up.

        ## Example
        fires: train/loss{layer} 1.0x3 20.0
        quiet: train/loss{layer} 1.0x3
        """
        for scope, highest in zip(losses.scopes, np.fmax.reduce(losses.values), strict=True):
            if highest > settings.limit:
                yield finding(Severity.WARNING, losses.last[losses.scopes.index(scope)], settings.limit, scope)

    with pytest.raises(AssertionError, match="layer was not read at this step"):
        contract.speaks_only_of_new_readings(dataclasses.replace(SOUND, check=any_scope, per_scope=True))


def test_a_gate_that_hides_a_finding_is_noticed():
    rule = dataclasses.replace(SOUND, gate=lambda settings, info: lambda step, loss, history: loss > 2 * settings.limit)
    with pytest.raises(AssertionError, match="hides a finding"):
        contract.gate_hides_nothing(rule, np.linspace(0, 100, 50, dtype=np.float32)[:, None], ("",))


def test_a_rule_that_takes_an_old_companion_for_news_is_noticed():
    def of_two(loss: Series, level: Series, settings: TooHigh) -> Finding | None:
        """Loss or its level above a limit.

        ## Why is this bad?
        It is made up.

        ## Example
        fires: 1.0x3 20.0 | train/loss_level 1.0x3 20.0
        quiet: 1.0x3
        """
        return finding(Severity.WARNING, level.last, settings.limit) if level.last > settings.limit else None

    two = ("train/loss", "train/loss_level")
    with pytest.raises(AssertionError, match="takes an old reading for a new one"):
        contract.speaks_only_of_new_readings(dataclasses.replace(SOUND, check=of_two, reads=two, when=two))


def test_a_rule_that_counts_on_a_companion_is_noticed():
    def above_its_level(loss: Series, level: Series, settings: TooHigh) -> Finding | None:
        return finding(Severity.WARNING, loss.last, settings.limit) if loss.last > level.values[-1] else None

    two = ("train/loss", "train/loss_level")
    with pytest.raises(IndexError):
        contract.bears_missing_companions(dataclasses.replace(documented(above_its_level), reads=two), 1.0)


def test_a_threshold_that_is_never_read_is_noticed():
    def deaf(loss: Series, settings: TooHigh) -> Finding | None:
        return finding(Severity.WARNING, loss.last, 10.0) if loss.last > 10.0 else None

    with pytest.raises(AssertionError, match=r"too-high never looks at \['limit'\]"):
        contract.reads_every_setting(documented(deaf))


def test_a_setting_that_does_not_say_what_it_counts_is_noticed():
    kind = dataclasses.make_dataclass(
        "Waits", [("window", int, between(3, 1))], bases=(Settings,), frozen=True, kw_only=True
    )
    with pytest.raises(AssertionError, match=r"Waits\.window counts what"):
        contract.says_what_its_settings_count(kind)


def test_a_metric_that_nobody_writes_is_noticed():
    with pytest.raises(AssertionError, match="nobody writes train/lost"):
        contract.reads_what_is_written(dataclasses.replace(SOUND, reads=("train/lost",)))


@pytest.mark.parametrize(
    ("messages", "defect"),
    [
        ([Message("It is {missing}")], "no message has only the keys"),
        ([Message("It is high", "loss {value}"), Message("It is still high", "loss {value}")], "no example leads to"),
        ([Message("It is high.", "loss {value}")], "It is high."),
        ([Message("It is high", "{value} · limit {bound}")], "nothing says what the number in '20' is"),
        ([Message("It is high")], "nothing says what 20.0 is"),
        ([Message("It is " + "very " * 30 + "high", "loss {value}")], "very"),
    ],
)
def test_a_message_that_does_not_fit_is_noticed(messages, defect):
    with pytest.raises(AssertionError, match=re.escape(defect)):
        contract.message_fits(dataclasses.replace(SOUND, messages=tuple(messages)))


@pytest.mark.parametrize("do", ["", "look at it", "Look at it.", "Look at {{this}}", "Look at {unknown}"])
def test_advice_that_does_not_say_what_to_do_is_noticed(do):
    numbers = {"unknown": float("nan")}
    with pytest.raises(AssertionError):
        contract.remedies_fit(dataclasses.replace(SOUND, remedies=(advise("look", do, "it is made up", **numbers),)))


@pytest.mark.parametrize(
    "source", ["def check(loss):\n    return loss > 17\n", "_LIMIT = 17.5\n\ndef check(loss):\n    return loss\n"]
)
def test_a_number_without_a_name_or_a_reason_is_noticed(source):
    with pytest.raises(AssertionError, match=r"17|what this number is for"):
        contract.numbers_are_settings(source)


def declare(check=too_high, code="L900", name="too-high", **given):
    """Declare the sound rule, but for what is given."""
    whole = {
        "reads": ("train/loss",), "message": SOUND.messages, "remedies": SOUND.remedies, "settings": TooHigh, **given,
    }  # fmt: skip
    rule(code, name, **whole)(check)


def undocumented(loss, settings: "TooHigh"):
    return None


def changed(before, after):
    def too_high(loss: Series, settings: "TooHigh") -> None:
        return None

    too_high.__doc__ = documented(too_high).check.__doc__.replace(before, after)
    return too_high


def without_settings(loss):
    return None


without_settings.__name__, without_settings.__doc__ = "too_high", too_high.__doc__
undocumented.__name__ = "too_high"


@pytest.mark.parametrize(
    ("given", "defect"),
    [
        ({"code": "Q900"}, "must be the letter of a family (L loss, G gradients"),
        ({"code": "L9"}, "and three digits"),
        ({"name": "Too high"}, "must be lower-case words joined by hyphens"),
        ({"name": "too-low"}, "its function must be called too_low, not too_high"),
        ({"check": undocumented}, "its docstring must begin with one sentence"),
        ({"check": changed("## Why is this bad?", "Why?")}, "must have the sections ## Why is this bad?"),
        ({"check": changed("fires:", "quiet:")}, "has no example that fires"),
        ({"check": changed("quiet:", "fires:")}, "has no example that stays quiet"),
        ({"check": changed("20.0", "twenty")}, "an example cannot be read: 'twenty'"),
        ({"remedies": ()}, "it has no remedies"),
        ({"message": ""}, "it has no message"),
        ({"message": "The loss is {}."}, "has no name"),
        ({"message": "The loss is {value."}, "cannot be filled in"),
        ({"settings": None}, "its function takes settings, but the declaration has no settings"),
        ({"check": without_settings}, "but its function takes no settings"),
        ({"settings": find_rule("loss-spike").settings}, "its function takes settings: TooHigh, not LossSpike"),
        ({"reads": ("loss",)}, "must be names of metrics"),
        ({"reads": ("train/loss", "train/lr")}, "it reads 2 metrics, but its function takes 1: loss"),
        ({"when": ("train/lr",)}, "must be among what it reads"),
        ({"hold": 0}, "hold and keep must be 1 or more"),
    ],
)
def test_an_incomplete_rule_is_an_error_that_says_what_is_missing(given, defect):
    with pytest.raises(ValueError, match=re.escape(defect)):
        declare(**given)


def test_settings_that_no_table_holds_are_an_error_that_says_what_to_add():
    with pytest.raises(
        ValueError, match=r"L900 too-high have no table of thresholds: add `too_high: TooHigh = TooHigh\(\)`"
    ):
        check_tables([SOUND], Thresholds)


def test_a_table_of_another_class_or_of_no_rule_is_an_error():
    spike = find_rule("loss-spike")
    with pytest.raises(ValueError, match=r"thresholds\.loss_spike is LossSpike, but L900 loss-spike has TooHigh"):
        check_tables([dataclasses.replace(SOUND, name="loss-spike")], Thresholds)
    with pytest.raises(ValueError, match="belongs to no rule"):
        check_tables([spike], Thresholds)
