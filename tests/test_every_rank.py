"""The same training, however it is split over processes, gives the same readings and the same alerts."""

import numpy as np
import pytest
import torch

import forewarn
from tests.processes import in_processes, skip_without_fsdp2
from tests.rank_runs import FAULTS, alerts, in_turn, readings, train

OF_A_BATCH = {
    "gradient/noise_scale", "monitor/unavailable", "monitor/overhead_share",
}  # fmt: skip
"""Readings of a rank's own batch or process: those of other sizes, or combined as the catalogue says."""

OF_UNITS = {"activation/channel_mean_spread", "activation/channel_std_spread", "activation/nonfinite"}
"""With tensor parallelism, ranks have other units, and copies of an output are counted on each."""

# FSDP1 hides the gradients of earlier steps while it runs, so a missing zero_grad is not seen there.

COUNTS = ("nonfinite", "zero_fraction", "missing", "stopped_by", "frozen_cause")


def assert_the_same(folder, how, fault, unread=frozenset()):
    one, split = readings(folder / f"one-{fault}"), readings(folder / f"{how}-{fault}")
    left_out = OF_A_BATCH | unread | (OF_UNITS if "tp" in how else set())
    one, split = ({key: run[key] for key in run if key[0] not in left_out} for run in (one, split))
    assert one.keys() == split.keys()
    for (name, scope), values in one.items():
        quantity = name.partition("/")[2]
        tolerance = 0.0 if quantity in COUNTS else 1e-4
        np.testing.assert_allclose(
            split[name, scope], values, rtol=tolerance, atol=1e-9, err_msg=f"{name} of {scope or 'the run'}, {how}"
        )
    found = [alert for alert in alerts(folder / f"{how}-{fault}") if alert[1] not in unread]
    assert found == alerts(folder / f"one-{fault}")
    assert_same_histograms(folder, how, fault)


def assert_same_histograms(folder, how, fault):
    with forewarn.open_run(folder / f"one-{fault}") as one, forewarn.open_run(folder / f"{how}-{fault}") as split:
        assert split.distributions() == one.distributions()
        for name, scopes in one.distributions().items():
            for scope in scopes:
                expected, found = one.histograms(name, scope), split.histograms(name, scope)
                np.testing.assert_array_equal(found.counts, expected.counts, err_msg=f"{name} of {scope}, {how}")
                np.testing.assert_array_equal(found.zeros, expected.zeros)


def compare(folder, num_ranks, cases):
    for fault in {fault for _, fault in cases}:
        train(0, 1, "one", fault, str(folder))
    in_processes(num_ranks, in_turn, num_ranks, cases, str(folder))
    for how, fault in cases:
        assert_the_same(folder, how, fault)


def weights(model):
    parts = (getattr(each, "to_local", lambda each=each: each)().detach().clone() for each in model.parameters())
    return list(parts)


def watched_and_not(rank, folder):
    for how in ("ddp", "fsdp2"):
        plain = weights(train(rank, 2, how, "healthy", folder, watched=False))
        assert all(map(torch.equal, plain, weights(train(rank, 2, how, "healthy", folder)))), how
    train(rank, 2, "fsdp2", "nan", folder)


def test_under_ddp_and_fsdp2_readings_are_those_of_one_process_and_training_is_bit_identical(tmp_path):
    skip_without_fsdp2()
    train(0, 1, "one", "healthy", str(tmp_path))
    train(0, 1, "one", "nan", str(tmp_path))
    in_processes(2, watched_and_not, str(tmp_path))
    for how, fault in (("ddp", "healthy"), ("fsdp2", "healthy"), ("fsdp2", "nan")):
        assert_the_same(tmp_path, how, fault)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "hows"), [(2, ("ddp", "fsdp2", "tp", "fsdp1")), (3, ("fsdp2",)), (4, ("hsdp", "fsdp2+tp"))]
)
def test_however_training_is_split_readings_and_alerts_are_those_of_one_process(tmp_path, num_ranks, hows):
    skip_without_fsdp2()
    cases = [(how, fault) for how in hows for fault in FAULTS]
    compare(tmp_path, num_ranks, [case for case in cases if case != ("fsdp1", "uncleared")])
