"""Remedies do what they say, from the last checkpoint on."""

import pytest
import torch
from torch import nn

from forewarn.lab.faults.remedying import USUAL, as_change, random_remedy
from forewarn.lab.faults.session import Session
from forewarn.types import Remedy


def rates(remedy, seen, num_steps=60, *, is_twin=False):
    """The learning rate of each step of a run with this remedy."""
    session = Session(0, num_steps, [as_change(remedy, seen, num_steps, is_twin=is_twin)])
    model = nn.Linear(2, 1)
    session.built(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.5)
    session.optimizer(optimizer)
    monitor = session.watch(model, optimizer)
    used = []
    while not session.is_over():
        used.append(optimizer.param_groups[0]["lr"])
        monitor.step(1.0)
    return used, optimizer.param_groups[0]


def test_a_lower_rate_holds_from_the_checkpoint_before_the_alert():
    used, _ = rates(Remedy("lower_lr", {"from": 0.4, "to": 0.1}, ""), 47)
    assert used == pytest.approx([1.0] * 40 + [0.25] * 20)


@pytest.mark.parametrize(
    ("action", "before", "to", "after"),
    [("lower_lr", 50.0, 1.0, 1.0), ("lower_lr", 50.0, 0.5, 0.5), ("raise_lr", 1e-4, 0.1, 1.0)],
)
def test_a_twin_gets_the_rate_that_is_advised_unless_it_is_beyond_it_already(action, before, to, after):
    used, _ = rates(Remedy(action, {"from": before, "to": to}, ""), 47, is_twin=True)
    assert used == pytest.approx([1.0] * 40 + [after] * 20)


def test_a_warm_up_rises_from_the_checkpoint_to_the_full_rate():
    used, _ = rates(Remedy("warm_up", {"steps": 4}, ""), 5)
    assert used[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_stopping_leaves_the_weights_where_they_are():
    used, _ = rates(Remedy("stop", {}, ""), 30)
    assert used == [1.0] * 30 + [0.0] * 30


@pytest.mark.parametrize(
    ("remedy", "name", "value"),
    [
        (Remedy("lower_weight_decay", {"from": 0.5, "to": 0.05}, ""), "weight_decay", 0.05),
        (Remedy("lower_weight_decay", {"factor": 0.1}, ""), "weight_decay", 0.05),
        (Remedy("lower_weight_decay", {"from": 9.0, "to": 0.9}, ""), "weight_decay", 0.5),
        (Remedy("lower_beta2", {"to": 0.95}, ""), "betas", (0.9, 0.95)),
    ],
)
def test_a_setting_of_the_optimizer_is_changed(remedy, name, value):
    _, group = rates(remedy, 25)
    assert group[name] == pytest.approx(value)


def test_what_only_a_person_can_do_is_no_change():
    for action in ("call_zero_grad", "inspect_labels", "widen"):
        assert as_change(Remedy(action, {}, ""), 0, 10) is None


def test_every_usual_remedy_can_be_carried_out_and_chance_repeats_itself():
    assert all(as_change(remedy, 0, 10) is not None for remedy in USUAL)
    assert random_remedy("mlp/no-step/1") == random_remedy("mlp/no-step/1")
    assert len({random_remedy(str(case)).action for case in range(50)}) > 5


def test_a_skipped_batch_is_replaced_by_the_one_before():
    session = Session(0, 3, [as_change(Remedy("skip_batch", {}, ""), 1, 3)])
    batches = []
    for step in range(3):
        session.step = step
        batches.append(session.batch(torch.full((2,), float(step)), torch.zeros(2))[0].tolist())
    assert batches == [[0, 0], [0, 0], [2, 2]]


def test_parameters_that_no_optimizer_has_join_the_nearest_relative():
    session = Session(0, 1, [as_change(Remedy("add_to_optimizer", {"parameter": "G.1.weight"}, ""), 0, 1)])
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for name in "DG"})
    session.built(model)
    for name in "DG":
        session.optimizer(torch.optim.SGD(model[name][0].parameters(), lr=0.1))
    session.watch(model)
    for name, optimizer in zip("DG", session.optimizers, strict=True):
        assert set(optimizer.param_groups[0]["params"]) == set(model[name].parameters())
