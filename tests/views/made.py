"""Alerts and blocks made by hand."""

from __future__ import annotations

import numpy as np

from forewarn.types import Alert, AlertState, Block, Finding, Remedy, Severity

LOWER = Remedy("lower_lr", {"from": 3e-4, "to": 1.5e-4}, "smaller steps keep the loss low")


def alert(
    code: str = "L102",
    scope: str = "",
    severity: Severity = Severity.WARNING,
    state: AlertState = AlertState.FIRING,
    value: float = 9.0,
    bound: float = 3.0,
) -> Alert:
    names = {"L102": "loss-spike", "U102": "update-ratio-high", "G104": "gradient-spike", "G102": "exploding-gradient"}
    finding = Finding(code, scope, 7, severity, value, bound, {"lasting_steps": 4.0})
    return Alert(
        code, names[code], scope, severity, state, since=5, fired=6, last=7, finding=finding, remedies=(LOWER, LOWER)
    )


def block(step: int, name: str, *values: float, scopes: tuple[str, ...] = ("",)) -> Block:
    return Block(step, 0.0, name, scopes, np.array(values, np.float32))
