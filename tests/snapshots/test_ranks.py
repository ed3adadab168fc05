"""With several processes, rank 0 writes the snapshot, and says that it knows its own batch only."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forewarn
from forewarn.store.snapshot_folders import read_snapshot, snapshots_in
from tests.processes import in_processes, skip_without_fsdp2

STEPS = 8


def trained(rank: int, how: str, path: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = {"snapshots": {"keep_batches": STEPS, "weights": "before"}}
    with forewarn.watch(model, optimizer, path, views=[], config=config) as monitor:
        for step in range(STEPS):
            inputs = torch.full((2, 4), float(rank))
            if step == 4 and rank == 0:
                inputs[1, 2] = math.nan
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        assert (monitor.snapshot() is not None) == (rank == 0)


@pytest.mark.ci
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_rank_0_writes_its_own_batch(how, tmp_path):
    if how == "fsdp2":
        skip_without_fsdp2()
    in_processes(2, trained, how, str(tmp_path / "run"))
    first = read_snapshot(snapshots_in(tmp_path / "run")[0])
    assert (first.step, first.num_ranks) == (4, 2)
    assert 4 in first.batches
    is_saved = (snapshots_in(tmp_path / "run")[0] / "weights.safetensors").exists()
    assert is_saved == (how == "ddp")
    if how == "fsdp2":
        assert "divided over the ranks" in " ".join(first.notes)
