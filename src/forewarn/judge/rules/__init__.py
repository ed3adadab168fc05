"""The rules, one file per family: every rule in a file of this package is built in."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from forewarn.judge.families import Family, Phase
from forewarn.judge.registry import Rule, check_distinct
from forewarn.suggestions import did_you_mean

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
_DECLARED = {id(rule): rule for file in _FILES for rule in vars(file).values() if isinstance(rule, Rule)}
_BUILT_IN = tuple(sorted(_DECLARED.values(), key=lambda rule: rule.code))
check_distinct(_BUILT_IN)
_BY_CODE = {rule.code: rule for rule in _BUILT_IN}


def all_rules() -> tuple[Rule, ...]:
    """Every built-in rule, by code."""
    return _BUILT_IN


def find_rule(code_or_name: str, own: Iterable[Rule] = ()) -> Rule:
    """The rule with this code or name, built in or among the user's `own`."""
    stripped = code_or_name.strip()
    by_code = {rule.code: rule for rule in (*_BUILT_IN, *own)}
    by_name = {rule.name: rule for rule in by_code.values()}
    rule = by_code.get(stripped.upper()) or by_name.get(stripped.lower())
    if rule is not None:
        return rule
    hint = did_you_mean(stripped, [*by_name, *by_code]) or "`forewarn rules` lists them all"
    raise ValueError(f"there is no rule {code_or_name!r}; {hint}")


def is_rule(code_or_name: str, own: Iterable[Rule] = ()) -> bool:
    """Whether there is a rule with this code or name."""
    try:
        return find_rule(code_or_name, own) is not None
    except ValueError:
        return False


def family_of(code: str) -> Family | None:
    """What the built-in rule with this code is about; None if there is no such rule, as in a run of another version."""
    rule = _BY_CODE.get(code)
    return None if rule is None else rule.family


def phase_of(code: str) -> Phase:
    """Where in a training step the rule with this code belongs."""
    family = family_of(code)
    return Phase.REST if family is None else family.phase
