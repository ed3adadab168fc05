"""The bounds of the rules about the learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from forewarn.settings import Settings, between


@dataclass(frozen=True, slots=True, kw_only=True)
class LrOffPlan(Settings):
    """U107."""

    tolerance: float = between(0.05, 0.0)
    """Share of the planned rate by which the rate may miss it."""
    negligible: float = between(0.005, 0.0)
    """Share of the highest planned rate by which it may miss it in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrJumpOnResume(Settings):
    """U108."""

    factor: float = between(1.5, 1.0)
    """Times, up or down, that the rate may change over a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrSpent(Settings):
    """U109."""

    share: float = between(1e-3, 0.0, 1.0)
    """Share of its peak below which a learning rate is spent."""
    steps: int = between(50, 1)
    """Steps that a run must go on for after that."""
    going_on: float = between(0.2, 0.0)
    """Share of the steps until then that it must go on for as well: the end of a long run is no mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpWithoutEnd(Settings):
    """U110."""

    share: float = between(0.3, 0.0, 1.0)
    """Share of the declared total of steps after which a rate that still rises has risen too long."""
    steps: int = between(20000, 1)
    """The same in steps, where no total is declared; this is information."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrNeverDecays(Settings):
    """U111."""

    share: float = between(0.9, 0.0, 1.0)
    """Share of the declared total of steps by which the rate should have begun to fall."""
    tolerance: float = between(0.01, 0.0, 1.0)
    """Share of its peak that it must have fallen by to have begun."""
