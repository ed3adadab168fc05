"""Options grouped under headings, so that a long `--help` stays readable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


class _GroupedOption(click.Option):
    def __init__(self, *names: Any, group: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Only the default: the error for a value out of range names the range."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra

    def make_metavar(self, ctx: click.Context) -> str:
        short = {click.types.IntRange: "N", click.types.FloatRange: "X"}
        return self.metavar or short.get(type(self.type)) or super().make_metavar(ctx)


class GroupedCommand(click.Command):
    """A command whose help lists its options by topic."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def options(group: str, *members: Callable[..., Any]) -> Callable[[Any], Any]:
    """Several options under one heading."""

    def add(command: Any) -> Any:
        for member in reversed(members):
            command = member(group)(command)
        return command

    return add


def option(*names: str, **settings: Any) -> Callable[[str], Any]:
    """One option, for `options` to put under a heading. Its default is shown unless it is a flag."""
    settings.setdefault("show_default", not settings.get("is_flag"))
    return lambda group: click.option(*names, cls=_GroupedOption, group=group, **settings)


_RULES: dict[str, Any] = {
    "multiple": True,
    "metavar": "MODULE",
    "help": "Also use your own rules from MODULE, a Python module or the path of a .py file. Repeatable.",
}
rules_option = click.option("--rules", "rule_modules", **_RULES)
"""For commands that apply or describe rules."""
grouped_rules_option = option("--rules", "rule_modules", show_default=False, **_RULES)
"""The same for commands with grouped options."""


POSITIVE = click.IntRange(min=1)
AT_LEAST_0 = click.FloatRange(min=0.0)
