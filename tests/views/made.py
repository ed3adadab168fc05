"""Alerts and blocks made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from forewarn.judge.headlines import tell
from forewarn.judge.rules import find_rule
from forewarn.types import Alert, AlertState, Block, Finding, Remedy, Severity

LOWER = Remedy(
    "lower_lr", {"from": 3e-4, "to": 1.5e-4}, "smaller steps keep the loss low",
    do="Lower the learning rate from 0.0003 to 0.00015",
)  # fmt: skip


def alert(
    code: str = "L102",
    scope: str = "",
    severity: Severity = Severity.WARNING,
    state: AlertState = AlertState.FIRING,
    value: float = 9.0,
    bound: float = 3.0,
    **given: Any,
) -> Alert:
    rule = find_rule(code)
    evidence = {"lasting_steps": 4.0, "level": 3.0, "ratio": value / 3.0}
    finding = Finding(code, scope, 7, severity, value, bound, evidence)
    return Alert(
        code, rule.name, scope, severity, state, since=5, fired=6, last=7, finding=finding, remedies=(LOWER, LOWER),
        **tell(rule.messages, finding)._asdict() | given,
    )  # fmt: skip


def block(step: int, name: str, *values: float, scopes: tuple[str, ...] = ("",)) -> Block:
    return Block(step, 0.0, name, scopes, np.array(values, np.float32))
