"""Values of several processes become one, whoever measured them."""

import logging

import pytest
import torch
import torch.distributed as dist

from forewarn.measure.ranks import ELEMENTS, OWN, Ranks, Total
from tests.processes import in_two_processes

VALUES = {
    "l2": ((3.0, 1.0), (4.0, 1.0), 5.0),
    "mean": ((1.0, 3.0), (5.0, 1.0), 2.0),
    "sum": ((1.0, 1.0), (2.5, 1.0), 3.5),
    "max": ((-2.0, 1.0), (-1.0, 1.0), -1.0),
    ELEMENTS: ((10.0, 4.0), (2.0, 2.0), 2.0),
}
"""How, then value and weight on each rank, then what becomes of them."""


def every_way(rank):
    everyone = (dist.group.WORLD,)
    ranks = Ranks(everyone, everyone, torch.device("cpu"))
    totals = [Total(how, *ranks_values[rank], how) for how, ranks_values in VALUES.items()]
    totals += [Total("own", float(rank), 1.0, OWN), Total(f"only on rank {rank}", 1.0, 1.0, "sum")]
    found, rows = ranks.reduced(totals, [], logging.getLogger("forewarn"))
    assert rows == []
    means = {each.key: each.value / each.weight for each in found}
    assert means == pytest.approx({"own": rank, **{how: whole for how, (_, _, whole) in VALUES.items()}})


def test_each_value_is_reduced_as_it_says_and_what_one_rank_alone_has_is_left_out():
    in_two_processes(every_way)


def test_in_one_process_nothing_changes():
    totals = [Total("a", 1.0), Total("b", 6.0, 3.0, ELEMENTS)]
    assert Ranks.of(torch.nn.Linear(1, 1)).reduced(totals, [], logging.getLogger("forewarn")) == (totals, [])
