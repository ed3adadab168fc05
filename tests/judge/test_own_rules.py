"""Rules of the user's own: how they are loaded, and that they are judged only where they were given."""

import dataclasses
import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

import forewarn
from forewarn.config import Config
from forewarn.judge.own_rules import GROUP, own_rules
from forewarn.judge.rules import all_rules, find_rule
from forewarn.judge.rules.loss import loss_spike

SOURCE = '''
from dataclasses import dataclass
import forewarn
from forewarn.judge.rules.loss import loss_spike

@dataclass(frozen=True, slots=True, kw_only=True)
class HighLoss(forewarn.Settings):
    """When it fires."""

    limit: float = forewarn.between(10.0, 0.0)
    """The highest loss that is well."""

@forewarn.rule("Z101", "high-loss", reads=("train/loss",), settings=HighLoss, message="The loss is {value}.",
               remedies=(forewarn.advise("look", "Look", "it is made up"),))
def high_loss(loss, settings: HighLoss):
    """Loss above a limit.

    ## Why is this bad?
    It is made up.

    ## Example
    fires: 1.0x3 20.0
    quiet: 1.0x3
    """
    if loss.last > settings.limit:
        return forewarn.finding(forewarn.Severity.WARNING, loss.last, settings.limit)
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`my_rules.py` in the working directory, and forgotten afterwards."""
    (tmp_path / "my_rules.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    yield tmp_path / "my_rules.py"
    sys.modules.pop("my_rules", None)


@pytest.fixture
def high_loss():
    names = {"__name__": __name__}
    exec(SOURCE, names)
    return names["high_loss"]


def test_a_rule_that_is_declared_and_given_to_nobody_is_not_judged(high_loss):
    assert "Z101" not in {rule.code for rule in all_rules()}
    assert "Z101" not in {rule.code for rule in Config().rule_set().rules}
    with pytest.raises(ValueError, match="there is no rule 'Z101'"):
        find_rule("Z101")


def test_a_rule_can_be_called_like_the_function_that_it_was_made_of(high_loss):
    assert isinstance(high_loss, forewarn.Rule)
    seen = high_loss(forewarn.Series.of([1.0, 20.0]), settings=high_loss.settings())
    assert (seen.value, seen.bound) == (20.0, 10.0)
    assert high_loss(forewarn.Series.of([1.0]), settings=high_loss.settings()) is None


def test_rules_are_given_one_by_one_or_by_what_holds_them(high_loss):
    holder = ModuleType("holder")
    holder.first, holder.built_in = high_loss, loss_spike
    assert own_rules([high_loss]) == own_rules([holder]) == own_rules([holder, high_loss]) == (high_loss,)
    assert own_rules([SimpleNamespace(one=high_loss)]) == (high_loss,)


@pytest.mark.parametrize("named", ["my_rules", "my_rules.py"])
def test_rules_are_named_by_module_or_by_path(module, named):
    (rule,) = own_rules(modules=[named])
    assert (rule.code, rule.name) == ("Z101", "high-loss")
    assert own_rules(modules=["my_rules", "my_rules.py", str(module)]) == (rule,), (
        "the same module, however it is named"
    )
    assert str(module.parent) not in sys.path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"code": "L900"}, "L is a family of built-in rules; codes of your own begin with Z, such as Z900"),
        ({"name": "loss-spike"}, "the rule Z101 loss-spike is declared twice"),
        ({"settings": find_rule("L102").settings}, "already belong to loss-spike; derive a separate class"),
        ({"explains": ("L999",)}, "there is no rule 'L999'"),
    ],
)
def test_a_rule_that_clashes_with_another_is_refused(high_loss, change, sentence):
    if "code" in change:
        change = {**change, "family": loss_spike.family}
    with pytest.raises(ValueError, match=sentence):
        own_rules([dataclasses.replace(high_loss, **change)])


def test_two_rules_of_one_code_are_refused(high_loss):
    with pytest.raises(ValueError, match="the rule Z101 other-name is declared twice"):
        own_rules([high_loss, dataclasses.replace(high_loss, name="other-name", settings=None)])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([3], "rules must be made by @forewarn.rule, or be modules that hold such rules, not 3"),
        (["my_rules"], "not 'my_rules'"),
        ([len], "not <built-in function len>"),
        ([lambda loss: None], "holds no rule; @forewarn.rule"),
        ([ModuleType("empty")], "empty holds no rule"),
    ],
)
def test_what_is_no_rule_is_refused_in_a_sentence(given, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        own_rules(given)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("nowhere", "", "the rules in 'nowhere' cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.py", "", "the rules in 'nowhere.py' cannot be loaded: FileNotFoundError"),
        ("bad_rules.py", "def", "the rules in 'bad_rules.py' cannot be loaded: SyntaxError"),
        ("bad_rules.py", "raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("bad_rules.py", "number = 1", "bad_rules holds no rule"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_refused_in_a_sentence(tmp_path, monkeypatch, name, text, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_rules.py").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        own_rules(modules=[name])
    sys.modules.pop("bad_rules", None)


def install(folder, monkeypatch, *lines):
    """A package with these entry points, as pip leaves it behind."""
    info = folder / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n" + "\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize("value", ["my_rules", "my_rules:high_loss"])
def test_an_installed_package_brings_rules(module, monkeypatch, value):
    install(module.parent, monkeypatch, f"mine = {value}")
    assert [rule.code for rule in own_rules()] == ["Z101"]
    assert [rule.code for rule in own_rules(modules=["my_rules"])] == ["Z101"]
    config, own = Config.with_rules({"thresholds": {"high_loss": {"limit": 5.0}}})
    assert config.rule_set(own).settings["Z101"].limit == 5.0


def test_a_broken_package_is_one_warning_and_the_others_are_loaded(module, monkeypatch, caplog):
    (module.parent / "exits.py").write_text("raise SystemExit('no licence')")
    (module.parent / "clashes.py").write_text(SOURCE)
    install(module.parent, monkeypatch, "a = nowhere", "b = exits", "c = my_rules", "d = clashes")
    with caplog.at_level(logging.WARNING):
        assert [rule.check.__module__ for rule in own_rules()] == ["my_rules"]
    sys.modules.pop("clashes", None)
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "the rules of the entry point a = nowhere are left out", "the rules of the entry point b = exits are left out",
        "the rules of the entry point d = clashes are left out",
    ]  # fmt: skip
    assert all("\n" not in record.message and record.exc_info is None for record in caplog.records)


# Settings


def test_a_config_has_a_table_for_each_rule_that_is_loaded(module):
    config, own = Config.with_rules({"rules": ["my_rules"], "thresholds": {"high_loss": {"limit": 3}}})
    assert config.rule_set(own).settings["Z101"].limit == 3
    assert config.thresholds.loss_spike == Config().thresholds.loss_spike
    assert config.to_dict()["thresholds"]["high_loss"] == {"limit": 3}
    again, _ = Config.with_rules(config, own)
    assert again is config


def test_a_config_of_python_gets_the_tables_too(high_loss):
    config, own = Config.with_rules(Config(history_window=77), [high_loss])
    assert config.history_window == 77
    assert config.to_dict()["thresholds"]["high_loss"] == {"limit": 10.0}
    assert config.rule_set(own).settings["Z101"] == high_loss.settings()


def test_rules_that_are_named_in_a_file_are_loaded_with_it(module):
    path = module.with_name("config.toml")
    path.write_text('rules = ["my_rules"]\n[thresholds.high_loss]\nlimit = 4.0\n')
    config, own = Config.with_rules(path)
    assert config.rule_set(own).settings["Z101"].limit == 4.0
    assert Config.load(path) == config


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"high_lost": {}}, "unknown setting 'thresholds.high_lost'; did you mean 'high_loss'"),
        ({"high_loss": {"limits": 1}}, "unknown setting 'thresholds.high_loss.limits'; did you mean 'limit'"),
        ({"high_loss": {"limit": -1.0}}, "HighLoss.limit must be at least 0, not -1.0"),
        ({"high_loss": 3}, "setting 'thresholds.high_loss' must be a table of settings, not 3"),
    ],
)
def test_wrong_settings_of_a_rule_of_ones_own_are_refused(high_loss, table, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        Config.with_rules({"thresholds": table}, [high_loss])


def test_a_table_of_a_rule_that_is_not_loaded_is_refused():
    with pytest.raises(ValueError, match=r"unknown setting 'thresholds\.high_loss'"):
        Config.of({"thresholds": {"high_loss": {"limit": 3.0}}})


def test_a_rule_of_ones_own_is_switched_off_like_any_other(high_loss):
    config, own = Config.with_rules({"disable": ["high-loss"]}, [high_loss])
    rule_set = config.rule_set(own)
    assert (high_loss in rule_set.rules, high_loss in rule_set.disabled) == (False, True)


def test_what_a_run_has_stored_is_kept_for_a_rule_that_is_loaded_and_imports_nothing(module, high_loss):
    config, own = Config.with_rules({"rules": ["my_rules"], "thresholds": {"high_loss": {"limit": 3}}, "disable": []})
    stored = {**config.to_dict(), "disable": ["high-loss", "l102"]}
    del sys.modules["my_rules"]
    plain = Config.from_stored(stored)
    assert plain.rules == ()
    assert plain.disable == ("l102",), "the other one is not known here"
    assert "my_rules" not in sys.modules
    assert Config.from_stored(stored, [high_loss]).rule_set([high_loss]).settings["Z101"].limit == 3
    assert own[0].name == "high-loss"


def test_what_a_rule_is_made_of_does_not_import_torch():
    names = [name for name in forewarn.__all__ if forewarn._HOMES.get(name) in {"catalogue", "settings", "types"}]
    names += ["rule", "Rule", "Series", "Panel", "finding", "advise"]
    code = f"import sys, forewarn; [getattr(forewarn, name) for name in {names}]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
