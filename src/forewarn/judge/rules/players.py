"""Rules about games: several optimizers, each with a loss of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forewarn.judge.headlines import Message
from forewarn.judge.objective import is_game
from forewarn.judge.registry import finding, rule
from forewarn.judge.remedies import advise
from forewarn.judge.series import Panel, median
from forewarn.judge.tensor_kinds import is_matrix
from forewarn.settings import Settings, between
from forewarn.types import Finding, RunInfo, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayersApart(Settings):
    """When `players-apart` fires."""

    factor: float = between(50.0, 1.0)
    """Largest allowed ratio between the median update ratios of two players."""
    readings: int = between(8, 1, counts="readings")
    """Number of recent measured steps."""


@rule(
    "U115", "players-apart",
    reads=("monitor/update_ratio_median", "update/ratio", "update/separate_losses"),
    when=("monitor/update_ratio_median",), per_scope=True, hold=3, keep=200,
    explains=(
        "L101", "L102", "L103", "L104", "L105", "L106", "L107", "L108", "E107", "G101", "G102", "G103", "G104", "G106",
        "G107", "U102", "U103", "U104", "W102", "A101", "A102", "A103", "A104",
    ),
    settings=PlayersApart,
    message=Message(
        "One player learns {value:×} as fast as the other",
        "update/weight ratio {fast} in {fast_player}, {slow} in {slow_player} · limit {bound:×}",
        "in a game such as a GAN, both players must keep pace: the generator learns nothing from a discriminator that "
        "is far ahead or far behind",
    ),
    remedies=(
        advise("balance_players", "Bring the learning rates of the players within a factor of ten of each other",
               "players whose steps are this far apart cannot learn from each other"),
    ),
)  # fmt: skip
def players_apart(
    typical: Panel, ratios: Panel, separate: Panel, settings: PlayersApart, info: RunInfo
) -> Finding | None:
    """One optimizer of a game moves its weights many times faster than another.

    ## Why is this bad?
    In a GAN, each side learns from the other. A discriminator that hardly moves tells the generator nothing, and one
    that races ahead leaves it no gradient. Learning rates that differ by a factor of four are common, by fifty they
    are a mistake, usually a zero too few or too many.

    It is judged if several optimizers step with losses of their own. A player is an optimizer or, if one has several
    parameter groups, a module at the top of the model.

    ## Example
    fires: 1e-3x12 | update/ratio{D.weight} 1e-6x12 | update/ratio{G.weight} 1e-3x12 | update/separate_losses 1x12
    quiet: 1e-3x12 | update/ratio{D.weight} 1e-4x12 | update/ratio{G.weight} 1e-3x12 | update/separate_losses 1x12
    quiet: 1e-3x12 | update/ratio{D.weight} 1e-6x12 | update/ratio{G.weight} 1e-3x12 | update/separate_losses 0x12
    """
    if ratios.at != typical.at or math.isnan(typical.series().last) or not is_game(separate.series(), info):
        return None
    recent = ratios.values[-settings.readings :].astype(np.float64)
    if len(recent) < settings.readings:
        return None
    players: dict[str, list[int]] = {}
    for index in np.flatnonzero(is_matrix(ratios.scopes, info)):
        players.setdefault(_player(ratios.scopes[index], info), []).append(int(index))
    moves = {player: recent[:, indices] for player, indices in players.items()}
    paces = {player: median(moved[moved > 0]) for player, moved in moves.items() if (moved > 0).any()}
    slow, fast = min(paces, key=paces.__getitem__, default=""), max(paces, key=paces.__getitem__, default="")
    if not paces or not paces[fast] > settings.factor * paces[slow]:
        return None
    return finding(
        Severity.WARNING, paces[fast] / paces[slow], settings.factor,
        slow_player=slow, fast_player=fast, slow=paces[slow], fast=paces[fast],
    )  # fmt: skip


def _player(scope: str, info: RunInfo) -> str:
    """Who trains a parameter: its optimizer, if each has one group, or else the module at the top of the model."""
    parameter = info.parameters.get(scope)
    has_own_group = len(info.groups) == len(info.optimizers) > 1
    if has_own_group and parameter is not None and parameter.group is not None:
        return f"group {parameter.group}"
    return scope.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class PlayersThresholds(Settings):
    """The settings of the rules in this file, by the name of the rule."""

    players_apart: PlayersApart = PlayersApart()
