"""Loops of other kinds on two ranks: what is read is what one process reads, or it is said to be unavailable."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import forewarn
from forewarn.types import Reason
from tests.processes import in_two_processes, skip_without_fsdp2
from tests.rank_runs import alerts, batch, made, readings, split

STEPS = 8
OF_ROUNDING = {"gradient/noise_scale", "monitor/unavailable", "monitor/overhead_share", "gradient/accumulation_growth"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.act = nn.ReLU()
        self.down = nn.Linear(12, 8)
        self.up.bias.data[::3] -= 3.0  # some units are dead

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.down(self.act(self.up(self.norm(x))))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Layer(), Layer()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def over_the_sequence(model):
    """Divide the sequence over the ranks between the layers that tensor parallelism splits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(2):
        for norm in ("norm", "first_norm"):
            plan[f"blocks.{number}.{norm}"] = SequenceParallel()
        plan[f"blocks.{number}.attention"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate()
        )
        for part in ("q", "k", "v"):
            plan[f"blocks.{number}.attention.{part}"] = ColwiseParallel()
        plan[f"blocks.{number}.attention.out"] = RowwiseParallel(output_layouts=Shard(1))
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def train_words(num_ranks, path, clips):
    torch.manual_seed(3)
    model = Words().double()
    model = over_the_sequence(model) if num_ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"measure": {"dead_unit_window": 1, "dead_unit_positions": 60}}
    with forewarn.watch(model, optimizer, path, every=1, views=[], config=config) as monitor:
        for step in range(STEPS):
            x = torch.randint(0, 11, (2, 12), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (x + 1).flatten() % 11)
            loss.backward()
            if clips:
                monitor.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        assert monitor._loop.failures == {}


def train_clipped(rank, num_ranks, path):
    model = made().float()  # FSDP1 clips no other numbers
    called = split(model, "fsdp1") if num_ranks > 1 else model
    if num_ranks > 1:
        with pytest.raises(ValueError, match="inside a FullyShardedDataParallel"):
            forewarn.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), f"{path}-inside")
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    with forewarn.watch(called, optimizer, path, every=1, views=[]) as monitor:
        for step in range(STEPS):
            x, y = batch(step, "fsdp1", rank, num_ranks)
            loss = nn.functional.cross_entropy(called(x.float()), y)
            loss.backward()
            monitor.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)


def train_micro_batches(rank, num_ranks, path):
    model = made()
    called = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with forewarn.watch(called, optimizer, path, every=1, views=[]) as monitor:
        for step in range(STEPS):
            for number in range(3):
                alone = num_ranks > 1 and number < 2
                x, y = batch(3 * step + number, "ddp", rank, num_ranks)
                with called.no_sync() if alone else contextlib.nullcontext():
                    (nn.functional.cross_entropy(called(x), y) / 3).backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(float(step))


def train_part(rank, num_ranks, path, saved, first, last):
    """Train some steps of a run, and save model and monitor after the first part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    whole = StateDictOptions(full_state_dict=True)
    model = made()
    called = split(model, "fsdp2") if num_ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = forewarn.watch(called, optimizer, path, every=1, views=[], resume=first > 0)
    if first:
        state = torch.load(saved, weights_only=True)
        set_model_state_dict(model, state["model"], options=whole) if num_ranks > 1 else model.load_state_dict(
            state["model"]
        )
        monitor.load_state_dict(state["monitor"])
    for step in range(first, last):
        x, y = batch(step, "fsdp2", rank, num_ranks)
        loss = nn.functional.cross_entropy(called(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss)
    if not first:
        weights = get_model_state_dict(model, options=whole) if num_ranks > 1 else model.state_dict()
        state = monitor.state_dict()
        if rank == 0:
            torch.save({"model": {name: one.clone() for name, one in weights.items()}, "monitor": state}, saved)
    monitor.close()


def on_two_ranks(rank, folder):
    train_words(2, f"{folder}/words-2", clips=False)
    train_words(2, f"{folder}/clipped-2", clips=True)
    train_micro_batches(rank, 2, f"{folder}/micro-2")
    train_clipped(rank, 2, f"{folder}/flat-2")
    train_part(rank, 2, f"{folder}/from-1-to-2", f"{folder}/one.pt", 4, STEPS)
    dist.barrier()
    train_part(rank, 2, f"{folder}/from-2-to-1", f"{folder}/two.pt", 0, 4)


def assert_equal(one, other, but=()):
    expected, found = readings(one), readings(other)
    for key, values in expected.items():
        if key[0] not in OF_ROUNDING and not key[0].startswith(but or ("-",)):
            np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-9, err_msg=str(key))
    return found


@pytest.mark.ci
def test_sequence_parallelism_micro_batches_and_another_number_of_ranks_after_a_resume(tmp_path):
    skip_without_fsdp2()
    for name, clips in (("words-1", False), ("clipped-1", True)):
        train_words(1, tmp_path / name, clips)
    train_micro_batches(0, 1, tmp_path / "micro-1")
    train_clipped(0, 1, tmp_path / "flat-1")
    train_part(0, 1, tmp_path / "straight", tmp_path / "straight.pt", 0, STEPS)
    train_part(0, 1, tmp_path / "from-1-to-2", tmp_path / "one.pt", 0, 4)
    in_two_processes(on_two_ranks, str(tmp_path))
    train_part(0, 1, tmp_path / "from-2-to-1", tmp_path / "two.pt", 4, STEPS)

    assert_equal(tmp_path / "micro-1", tmp_path / "micro-2")
    of_whole = [("train/loss", ""), ("gradient/global_norm", ""), ("gradient/global_norm_clipped", "")]
    one, two = (readings(tmp_path / f"flat-{number}") for number in (1, 2))
    for key in of_whole + [key for key in one if key[0] in ("gradient/norm", "weight/norm", "update/ratio")]:
        np.testing.assert_allclose(two[key], one[key], rtol=1e-4, atol=1e-6, err_msg=str(key))
    for name in ("from-1-to-2", "from-2-to-1"):
        found = assert_equal(tmp_path / "straight", tmp_path / name)
        assert len(found["train/loss", ""]) == STEPS
        assert alerts(tmp_path / name) == alerts(tmp_path / "straight")

    # With sequence parallelism, the gradients of the norms are sums that only clipping or the optimizer forms.
    of_norms = ("gradient/", "update/ratio_estimate", "monitor/", "activation/nonfinite", "activation/channel_")
    found = assert_equal(tmp_path / "words-1", tmp_path / "words-2", but=of_norms)
    assert ("gradient/global_norm", "") not in found
    assert found["monitor/unavailable", "gradient/global_norm"] == [Reason.SUM_OVER_RANKS]
    assert_equal(tmp_path / "clipped-1", tmp_path / "clipped-2", but=of_norms)
    one, two = (readings(tmp_path / f"clipped-{number}") for number in (1, 2))
    of_others = [key for key in one if key[0] == "gradient/norm" and "norm" not in key[1]]
    for key in [("gradient/global_norm", ""), *of_others]:
        np.testing.assert_allclose(two[key], one[key], rtol=1e-4, atol=1e-12, err_msg=str(key))
    assert {scope for name, scope in two if name == "attention/entropy"} == {
        f"blocks.{number}.attention.head_{head}" for number in range(2) for head in range(2)
    }
    assert np.nanmax(one["activation/dead_fraction", "blocks.0.act"]) > 0
