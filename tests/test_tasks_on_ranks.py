"""Several tasks on several ranks: gradients and learned weights are those of one process."""

import numpy as np
import pytest
import torch
from torch import nn

import forewarn
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probes import tasks
from forewarn.measure.probes.tasks import TaskProbe, products
from forewarn.types import Reason
from tests.processes import in_processes, skip_without_fsdp2
from tests.task_runs import of_tasks, train_tasks

LAST, ALL = {"shared": None}, {"shared": "blocks"}
BALANCED = ({"balance": "gradnorm"}, {"balance": "uncertainty"})


def in_turn(rank, num_ranks, cases, folder):
    for how, settings in cases:
        train_tasks(rank, num_ranks, how, folder, settings)


def compare(folder, num_ranks, cases):
    alone = []
    for _, settings in cases:
        if settings not in alone:
            alone.append(settings)
            train_tasks(0, 1, "one", str(folder), settings)
    in_processes(num_ranks, in_turn, num_ranks, cases, str(folder))
    for how, settings in cases:
        name = "-".join(str(value) for value in settings.values())
        expected, found = of_tasks(folder / f"one-{name}"), of_tasks(folder / f"{how}-{name}")
        assert {"task/gradient_norm", "task/ratio", "task/cosine", "task/weight"} <= {key[0] for key in expected}
        assert found.keys() == expected.keys(), how
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-6, atol=1e-9, err_msg=f"{key}, {how}, {name}")


def watched_and_not(rank, folder):
    for how in ("ddp", "fsdp2"):
        plain = train_tasks(rank, 2, how, folder, {}, watched=False)
        assert all(map(torch.equal, plain, train_tasks(rank, 2, how, folder, LAST))), how
    in_turn(rank, 2, [(how, settings) for how in ("ddp", "fsdp2") for settings in BALANCED], folder)


def test_tasks_on_two_ranks_are_read_and_balanced_as_on_one_and_training_is_bit_identical(tmp_path):
    skip_without_fsdp2()
    for settings in (LAST, *BALANCED):
        train_tasks(0, 1, "one", str(tmp_path), settings)
    in_processes(2, watched_and_not, str(tmp_path))
    for how in ("ddp", "fsdp2"):
        for name in ("None", "gradnorm", "uncertainty"):
            expected, found = of_tasks(tmp_path / f"one-{name}"), of_tasks(tmp_path / f"{how}-{name}")
            assert found.keys() == expected.keys() != set()
            for key, values in expected.items():
                np.testing.assert_allclose(found[key], values, rtol=1e-6, atol=1e-9, err_msg=f"{key}, {how}, {name}")
    weights = of_tasks(tmp_path / "one-gradnorm")["task/weight", "value"]
    assert weights[0] == 1.0
    assert abs(weights[-1] - 1.0) > 0.01


@pytest.mark.ci
@pytest.mark.parametrize(("num_ranks", "hows"), [(2, ("ddp", "tp", "fsdp2")), (3, ("fsdp2",)), (4, ("hsdp",))])
def test_however_training_is_split_the_tasks_are_those_of_one_process(tmp_path, num_ranks, hows):
    skip_without_fsdp2()
    cases = [(how, LAST) for how in hows] + [("ddp", ALL)] * ("ddp" in hows) + [("tp", BALANCED[0])] * ("tp" in hows)
    compare(tmp_path, num_ranks, cases)


def out_of_turn(rank, folder):
    for how, settings in (("fsdp2, heads too", LAST), ("fsdp2", ALL), ("tp", ALL)):
        train_tasks(rank, 2, how, folder, settings)
    plain = train_tasks(rank, 2, "fsdp2", folder, LAST, watched=False, twice=True)
    assert all(map(torch.equal, plain, train_tasks(rank, 2, "fsdp2", folder, LAST, twice=True)))


@pytest.mark.ci
def test_a_pass_that_would_send_messages_of_its_own_is_not_made(tmp_path):
    skip_without_fsdp2()
    in_processes(2, out_of_turn, str(tmp_path))
    for name, reason in (
        ("fsdp2, heads too-None", Reason.SHARDED_PARAMETERS),
        ("fsdp2-blocks", Reason.SHARDED_PARAMETERS),
        ("tp-blocks", Reason.NEEDS_MESSAGES),
        ("fsdp2-None", Reason.SHARDED_PARAMETERS),
    ):
        with forewarn.open_run(tmp_path / name) as run:
            assert run.series("monitor/unavailable", "task/gradient_norm").values[-1] == reason
            assert len(run.series("task/loss", "kind")) == 6
            assert "task/gradient_norm" not in run.names()


def test_a_long_gradient_is_folded_without_losing_its_norms_and_cosines():
    model = nn.Linear(512, 128)
    probe = TaskProbe(ParameterIndex(model, []), None)
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(128, 512, generator=generator)
    first[:, 7] *= 100  # one input is much larger than the others
    second = first + 50 * torch.randn(128, 512, generator=generator)
    halves = [[[part * share] for part in (first, second)] for share in (0.5, 1.5)]  # of two ranks, whose mean counts
    rows = sum(probe._rows(half, [model.weight], torch.device("cpu")).numpy() for half in halves)
    assert rows.shape[1] == tasks.MOST_VALUES + 2
    inner = products(rows, 2)
    whole = torch.stack([first.flatten(), second.flatten()]).double()
    expected = (whole @ whole.T).numpy()
    norms = np.sqrt(np.diagonal(expected))
    assert np.abs((inner - expected) / np.outer(norms, norms)).max() < 0.05
    assert products(rows, 3) is None
