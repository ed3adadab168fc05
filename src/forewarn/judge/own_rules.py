"""Rules of the user's own: given to `watch`, or found in modules and packages that the user names or has installed.

What a run directory holds never decides what is imported here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from forewarn.files import check_regular
from forewarn.judge.families import Family
from forewarn.judge.registry import Rule, check_distinct
from forewarn.judge.rules import all_rules, find_rule

_log = logging.getLogger("forewarn")

GROUP = "forewarn.rules"
"""The entry points by which an installed package brings rules."""


def own_rules(rules: Iterable[Any] = (), modules: Iterable[str] = ()) -> tuple[Rule, ...]:
    """The given rules, those in these modules, and those that installed packages bring, sorted by code.

    A given rule or module that cannot be used raises TypeError or ValueError; a package's only logs a warning.
    """
    own = [rule for holder in rules for rule in rules_in(holder)]
    own += [rule for module in modules for rule in rules_in(_imported(module))]
    own = _once(own)
    _check(own)
    for entry_point in entry_points(group=GROUP):
        own = _with_entry_point(own, entry_point)
    return tuple(sorted(own, key=lambda rule: rule.code))


def rules_in(holder: Any) -> list[Rule]:
    """The rule that this is, or those that this module or object holds; built-in ones that it uses do not count."""
    if isinstance(holder, Rule):
        return [holder]
    if isinstance(holder, str) or not hasattr(holder, "__dict__"):
        raise TypeError(f"rules must be made by @forewarn.rule, or be modules that hold such rules, not {holder!r}")
    built_in = set(map(id, all_rules()))
    rules = [value for value in vars(holder).values() if isinstance(value, Rule) and id(value) not in built_in]
    if not rules:
        name = getattr(holder, "__name__", None) or type(holder).__name__
        raise ValueError(f"{name} holds no rule; @forewarn.rule(...) above a function makes one")
    return rules


def _imported(name: str) -> ModuleType:
    """The module of this name, or at this path if it ends in .py; the working directory is searched last."""
    try:
        return _from_file(Path(name)) if name.endswith(".py") else _from_path(name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the rules in {name!r} cannot be loaded: {_in_one_line(error)}") from error


def _from_path(name: str) -> ModuleType:
    with _working_directory_on_path():
        return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    check_regular(path)
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__dict__", {}).get("__file__") or "")
        if file.name == path.name and file.resolve() == path:
            return module  # its rules are the same objects, however often it is named
    name = path.stem if path.stem not in sys.modules else str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the annotations of its settings are looked up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _working_directory_on_path() -> Iterator[None]:
    """The script `forewarn`, unlike `python -m forewarn`, does not look there by itself."""
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _with_entry_point(own: Sequence[Rule], entry_point: EntryPoint) -> list[Rule]:
    """These rules and those of an installed package; one that is broken stops neither a training nor a check."""
    try:
        more = _once([*own, *rules_in(entry_point.load())])
        _check(more)
        return more
    except (Exception, SystemExit) as error:
        _log.warning(
            "the rules of the entry point %s = %s are left out: %s",
            entry_point.name, entry_point.value, _in_one_line(error),
        )  # fmt: skip
        return list(own)


def _once(rules: Iterable[Rule]) -> list[Rule]:
    """Each rule once, also where it was given and named as well."""
    return list({id(rule): rule for rule in rules}.values())


def _check(own: Sequence[Rule]) -> None:
    for rule in own:
        if rule.family is not Family.OWN:
            raise ValueError(
                f"the code of your rule {rule.name} is {rule.code}, but {rule.code[0]} is a family of built-in rules; "
                f"codes of your own begin with {Family.OWN.letter}, such as {Family.OWN.letter}{rule.code[1:]}"
            )
    check_distinct([*all_rules(), *own])
    for rule in own:
        for code in rule.explains:
            find_rule(code, own)


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": ")
