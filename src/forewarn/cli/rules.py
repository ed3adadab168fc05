"""`forewarn rules`: list all rules."""

from __future__ import annotations

import click

from forewarn.cli.option_groups import rules_option

WIDE = 140
"""Minimum terminal width to show the metrics that a rule reads."""


@click.command()
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON list and nothing else.")
@rules_option
def command(wants_json: bool, rule_modules: tuple[str, ...]) -> None:
    """List every rule with its code, name and summary.

    To write your own rules, see docs/your_own.md.

    \b
    Examples:
      forewarn rules
      forewarn rules --rules my_rules
      forewarn rules --json | jq -r '.[].name'
    """
    from forewarn.cli.terminal import loaded_rules, output, print_json, quiet_table, show
    from forewarn.judge.rules import all_rules

    rules = (*all_rules(), *loaded_rules(rule_modules))
    if wants_json:
        print_json(
            [{"code": rule.code, "name": rule.name, "summary": rule.summary, "reads": rule.reads} for rule in rules]
        )
        return
    table = quiet_table()
    table.add_column("code", style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("summary")
    console = output()
    if is_wide := console.width >= WIDE:
        table.add_column("reads", style="dim")
    for rule in rules:
        table.add_row(rule.code, rule.name, rule.summary, *([" ".join(rule.reads)] if is_wide else []))
    show(table, "\nNext: forewarn explain NAME", console=console)
