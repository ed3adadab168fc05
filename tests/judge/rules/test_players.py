"""Games: several optimizers, each with a loss of its own."""

import pytest
import torch
from torch import nn

import forewarn
from forewarn.types import ParameterInfo, RunInfo
from tests.judge.rules.runs import Run


def fed(ratios, objective="auto", separate=1.0, num_groups=2):
    parameters = {
        name: ParameterInfo((8, 8), "Linear.weight", "float32", group, True)
        for group, name in enumerate(("net.d.weight", "net.g.weight"))
    }
    info = RunInfo(
        parameters=parameters, optimizers=("Adam", "Adam"), groups=({"lr": 1.0},) * num_groups, objective=objective
    )
    run = Run("U115", info=info)
    for _ in range(12):
        run.feed({
            "monitor/update_ratio_median": 1e-3, "update/ratio": dict(zip(parameters, ratios, strict=True)),
            "update/separate_losses": separate,
        })  # fmt: skip
    return run.ledger.alerts


def test_players_are_told_apart_by_their_optimizer():
    (alert,) = fed([1e-6, 1e-3])
    assert alert.finding.value == pytest.approx(1000, rel=1e-3)
    assert (alert.finding.evidence["slow_player"], alert.finding.evidence["fast_player"]) == ("group 0", "group 1")
    assert fed([1e-4, 1e-3]) == ()


def test_without_a_group_each_the_modules_at_the_top_are_the_players():
    assert fed([1e-6, 1e-3], num_groups=3) == ()  # both below `net`


def test_two_optimizers_of_one_loss_play_no_game():
    assert fed([1e-6, 1e-3], separate=0.0) == ()
    assert fed([1e-6, 1e-3], objective="loss") == ()


def discriminator_that_hardly_learns(run):
    torch.manual_seed(0)
    players = nn.ModuleDict({"G": nn.Linear(4, 2), "D": nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))})
    slow = torch.optim.Adam(players["D"].parameters(), lr=1e-6)
    fast = torch.optim.Adam(players["G"].parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    with forewarn.watch(players, [slow, fast], run, every=5) as monitor:
        for _ in range(80):
            fake = players["G"](torch.randn(32, 4))
            slow.zero_grad()
            real = criterion(players["D"](torch.randn(32, 2) + 1), ones)
            loss = real + criterion(players["D"](fake.detach()), zeros)
            loss.backward()
            slow.step()
            fast.zero_grad()
            generated = criterion(players["D"](fake), ones)
            generated.backward()
            fast.step()
            monitor.step(loss + generated)
    return monitor


FAULTS = {"U115": discriminator_that_hardly_learns}
