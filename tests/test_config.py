"""The settings: what is out of range, unknown or of the wrong type says so."""

import dataclasses
import json
import math

import pytest

from forewarn.config import Config, Thresholds
from forewarn.judge.documentation import field_docs
from forewarn.judge.rules.activations import DeadUnits
from forewarn.judge.rules.frozen import FrozenWeight
from forewarn.judge.rules.gradients import GradientSpike
from forewarn.judge.rules.loss import LossSpike
from forewarn.judge.spike import Spike
from forewarn.measure.options import Measure
from forewarn.plan import Plan
from forewarn.settings import Settings

TABLES = [
    Config,
    Measure,
    Thresholds,
    *(type(getattr(Thresholds(), each.name)) for each in dataclasses.fields(Thresholds)),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_field_has_a_docstring_of_its_own(table):
    documented = field_docs(table)
    for each in dataclasses.fields(table):
        if table is not Thresholds and not issubclass(type(each.default), Settings):
            assert documented[each.name].endswith("."), each.name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_default_is_within_its_own_bounds(table):
    table()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"measure": {"ema_decay": 1.0}}, "Measure.ema_decay must be between 0 and 0.99999, not 1.0"),
        ({"measure": {"sample_size": 0}}, "Measure.sample_size must be at least 1, not 0"),
        ({"measure": {"ema_decay": math.nan}}, "Measure.ema_decay must be between"),
        ({"history_window": 63}, "Config.history_window must be between 64 and"),
        (
            {"measure": {"modules": "("}},
            r"Measure.modules must be a regular expression, but '\(' is not valid: missing \), unterminated",
        ),
    ],
)
def test_a_value_out_of_range_says_what_was_expected(settings, said):
    with pytest.raises(ValueError, match=said):
        Config.from_dict(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"history_window": 100.5}, {"history_window": True}, {"early_stopping_min_delta": "0.9"},
        {"early_stopping_min_delta": None}, {"disable": "L102"}, {"disable": ("L102", 3)},
        {"hyperparameters": 3}, {"thresholds": {"loss_spike": {}}}, {"thresholds": None},
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_says_which(settings):
    with pytest.raises(TypeError, match=f"Config.{next(iter(settings))} must be"):
        Config(**settings)


def test_a_whole_number_is_a_float_where_one_is_wanted():
    assert Measure(ema_decay=0).ema_decay == 0


def test_a_level_needs_no_more_values_than_it_has():
    with pytest.raises(ValueError, match=r"Spike.minimum \(70\) must not exceed Spike.window \(64\)"):
        Spike(minimum=70)


def test_unknown_names_come_with_a_suggestion():
    with pytest.raises(ValueError, match=r"unknown setting 'measure.sample_sise'; did you mean 'sample_size'"):
        Config.from_dict({"measure": {"sample_sise": 3}})
    with pytest.raises(ValueError, match=r"unknown setting 'sample_sise'; did you mean 'measure.sample_size'"):
        Config.from_dict({"sample_sise": 3})
    with pytest.raises(ValueError, match=r"'thresholds.loss_spike.warning_facto'; did you mean 'warning_factor'"):
        Config.from_dict({"thresholds": {"loss_spike": {"warning_facto": 3}}})
    with pytest.raises(ValueError, match="unknown setting 'zzz'; choose from anomalies, balancing, detail_window, "):
        Config.from_dict({"zzz": 3})


def test_a_table_cannot_be_a_number():
    with pytest.raises(TypeError, match=r"setting 'thresholds.loss_spike' must be a table of settings, not 3"):
        Config.from_dict({"thresholds": {"loss_spike": 3}})


def test_settings_are_read_from_toml(tmp_path):
    path = tmp_path / "forewarn.toml"
    path.write_text(
        'disable = ["loss-spike", "G104"]\n[measure]\nsample_size = 64\n[hyperparameters]\nsteps = 1000\n'
        "[thresholds.exploding_gradient]\nwarning = 10\n"
    )
    config = Config.load(path)
    assert config.measure.sample_size == 64
    assert config.hyperparameters == {"steps": 1000}
    assert config.thresholds.exploding_gradient.warning == 10
    assert config.thresholds.exploding_gradient.critical == 1000, "what is not named keeps its default"
    assert {"L102", "G104"}.isdisjoint(rule.code for rule in config.rule_set().rules)


def test_toml_that_is_none_says_where(tmp_path):
    path = tmp_path / "forewarn.toml"
    path.write_text("sample_size = = 3")
    with pytest.raises(ValueError, match=r"forewarn.toml is not valid TOML: .*line 1"):
        Config.load(path)


def test_a_missing_file_stays_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Config.load(tmp_path / "none.toml")


def test_a_config_survives_json():
    config = Config(
        measure=Measure(sample_size=7), disable=("L102",), thresholds=Thresholds(loss_spike=LossSpike(k=3.0))
    )
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_config_of_an_earlier_version_has_its_settings_in_their_new_places():
    stored = {
        "sample_size": 7, "histograms": "off", "plan": {"total": 9, "gone": 1}, "history_window": 99, "gone": 3,
        "thresholds": {
            "dead_units": {"window": 20, "positions": 5, "share": 0.3}, "saturated_units": {"level": 0.9},
            "frozen_weight": {"patience": 8},
        },
    }  # fmt: skip
    config = Config.from_stored(stored)
    assert config == Config(
        measure=Measure(
            sample_size=7, histograms="off", plan=Plan(total=9), dead_unit_window=20, dead_unit_positions=5,
            saturation_level=0.9,
        ),
        history_window=99,
        thresholds=Thresholds(dead_units=DeadUnits(share=0.3), frozen_weight=FrozenWeight(patience=8)),
    )  # fmt: skip
    assert Config.from_stored(config.to_dict()) == config


def test_a_config_for_a_stored_run_takes_what_is_fixed_about_the_run_from_it():
    stored = Config(measure=Measure(sample_size=7), hyperparameters={"dropout": 0.1}).to_dict()
    config, _ = Config.for_stored({"history_window": 99}, stored)
    assert (config.history_window, config.measure.sample_size) == (99, 7)
    assert config.hyperparameters == {"dropout": 0.1}
    with pytest.raises(
        ValueError, match=r"\[measure\] sample_size = 1024 cannot be changed afterwards: .* with 7; remove"
    ):
        Config.for_stored({"measure": {"sample_size": 1024}}, stored)


def test_rules_that_agree_on_a_level_share_it():
    assert LossSpike(warning_factor=3.0).key == LossSpike().key == Spike().key
    assert GradientSpike().key != Spike().key
    assert Spike.from_key(GradientSpike().key).key == GradientSpike().key


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().history_window = 64
