import numpy as np
import torch

from forewarn.lab.bench.contender import Contender, Turn
from forewarn.lab.bench.counting import held_bytes, operations
from forewarn.lab.bench.rounds import past_set_aside
from forewarn.lab.bench.tiers import tiers
from forewarn.measure.engine import native


class Fetching(Contender):
    """Two operations that wait, and one that does not."""

    def after_backward(self, loss) -> None:
        with torch.no_grad():
            loss.item()
            float(loss + 1)


class Keeping(Contender):
    """Holds a million bytes in a tensor, as much in an array and as much in Python."""

    def attach(self, training, turn) -> None:
        super().attach(training, turn)
        self.kept = [torch.zeros(250_000), np.ones(250_000, np.float32), bytearray(1_000_000)]
        self.seen_twice = self.kept[0].view(-1)


def test_operations_and_syncs_are_those_that_a_contender_adds(small_workload, tmp_path):
    turn = Turn(tmp_path, 3)
    alone = operations(small_workload, Contender(), turn)
    fetching = operations(small_workload, Fetching(), turn)
    assert fetching.syncs - alone.syncs == 2
    assert fetching.operations - alone.operations == 3  # add and the two that wait


def test_forewarn_adds_few_operations_to_a_step_and_never_waits(small_workload, tmp_path):
    alone = operations(small_workload, Contender(), Turn(tmp_path, 5))
    added = {}
    for tier in tiers():
        counted = operations(small_workload, tier, Turn(tmp_path / tier.name, 5))
        assert counted.syncs == alone.syncs
        added[tier.name] = counted.operations - alone.operations
    assert 0 < added["forewarn-every-step"] <= 16
    detailed = added["forewarn-full"] - added["forewarn-every-step"]
    assert detailed == 0 if native.available() else detailed > 0
    assert 0 <= added["forewarn-default"] - added["forewarn-every-step"] <= 0.02 * detailed + 1.1


def test_bytes_are_counted_once_wherever_they_are(small_workload, tmp_path):
    turn = Turn(tmp_path, 3)
    with past_set_aside():
        held_bytes(small_workload, Contender(), turn)  # what torch keeps from its first use
        added = held_bytes(small_workload, Keeping(), turn) - held_bytes(small_workload, Contender(), turn)
    assert abs(added - 3_000_000) < 50_000
