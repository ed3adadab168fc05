"""Nothing that monitors may change what it monitors: the numbers of a run are the same with and without it."""

import copy
import io
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import forewarn
from forewarn.lab.data import TokenBatches, stdlib_text
from forewarn.lab.gpt import GPT, GPTConfig
from tests.bitwise import random_states, seed_everything

OPTIMIZERS = {
    "adamw-foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def train(make_optimizer, watch, *, clip: str, steps: int = 200):
    seed_everything(0)
    model = GPT(GPTConfig(context=16, depth=2, heads=2, width=32, dropout=0.1))
    optimizer = make_optimizer(model.parameters())
    batches = iter(TokenBatches(stdlib_text(200_000), batch_size=4, context=16, seed=0))
    monitor = watch(model, optimizer, every=3) if watch else None
    losses = []
    for _ in range(steps):
        loss = model(*next(batches))
        loss.backward()
        if clip == "monitor" and monitor:
            monitor.clip_grad_norm_(0.5)
        elif clip != "none":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.step(loss)
        losses.append(loss.item())
    return losses, model.state_dict(), random_states()


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("adamw-foreach", "none"),
        ("adamw-foreach", "monitor"),
        ("adamw-fused", "torch"),
        ("adamw-fused", "monitor"),
        ("sgd", "none"),
    ],
)
def test_loss_weights_and_random_state_are_bit_identical_over_200_steps(name, clip, watch):
    bare = train(OPTIMIZERS[name], None, clip=clip)
    watched = train(OPTIMIZERS[name], watch, clip=clip)
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][key], watched[1][key]) for key in bare[1])
    assert bare[2] == watched[2]


def train_two_tasks(watch, weights, steps=60):
    """A language model with an auxiliary head; by hand, or through `monitor.combine_losses`."""
    seed_everything(0)
    model = GPT(GPTConfig(context=16, depth=2, heads=2, width=32, dropout=0.1))
    auxiliary = torch.nn.Linear(256, 4)
    both = torch.nn.ModuleDict({"gpt": model, "auxiliary": auxiliary})
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3)
    batches = iter(TokenBatches(stdlib_text(200_000), batch_size=4, context=16, seed=0))
    monitor = watch(both, optimizer, every=3) if watch else None
    losses = []
    for _ in range(steps):
        inputs, targets = next(batches)
        logits = model(inputs)
        words = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1))
        kinds = torch.nn.functional.cross_entropy(auxiliary(logits).reshape(-1, 4), targets.reshape(-1) % 4)
        size = logits.square().mean()
        if monitor:
            loss = monitor.combine_losses({"words": words, "kinds": kinds, "size": size}, weights=weights, every=2)
        elif weights:
            loss = sum(weights[name] * one for name, one in (("words", words), ("kinds", kinds), ("size", size)))
        else:
            loss = words + kinds + size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.step(loss)
        losses.append(loss.item())
    return losses, both.state_dict(), random_states()


@pytest.mark.parametrize("weights", [None, {"words": 1.0, "kinds": 0.3, "size": 1e-3}])
def test_several_tasks_are_bit_identical_to_their_sum_written_by_hand(watch, weights):
    bare = train_two_tasks(None, weights)
    watched = train_two_tasks(watch, weights)
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][key], watched[1][key]) for key in bare[1])
    assert bare[2] == watched[2]


class Mixed(nn.Module):
    """Every kind of layer that is looked into: convolutions, norms, bounded and rectified units, attention, dropout."""

    def __init__(self, checkpointing: bool | None):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.head = nn.Sequential(nn.Sigmoid(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.reentrant = checkpointing

    def forward(self, x):
        x = self.stem(x).transpose(1, 2)
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x + self.attention(x, x, x)[0])


def train_mixed(watch, how: str, steps: int = 25):
    seed_everything(0)
    model = Mixed({"checkpointed": False, "checkpointed-reentrant": True}.get(how))
    called = torch.compile(model, backend="eager") if how == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = (
        watch(called, optimizer, every=3, config=forewarn.Config(measure=forewarn.Measure(modules="block")))
        if watch
        else None
    )
    losses = []
    for _ in range(steps):
        for _ in range(3 if how == "accumulated" else 1):
            loss = called(torch.randn(4, 1, 12)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.step(loss)
        losses.append(loss.item())
    if monitor:
        assert monitor._loop.failures == {}
    return losses, model.state_dict(), random_states()


@pytest.mark.parametrize("how", ["plain", "accumulated", "checkpointed", "checkpointed-reentrant", "compiled"])
def test_looking_into_every_kind_of_layer_changes_no_bit(how, watch):
    bare, watched = train_mixed(None, how), train_mixed(watch, how)
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][key], watched[1][key]) for key in bare[1])
    assert bare[2] == watched[2]


def test_a_watched_model_can_be_copied_and_saved_and_its_copies_reach_nobody(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    model(torch.ones(2, 4)).sum().backward()
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    before = dict(monitor._probes["gradients"]._latest)
    assert before
    for other in (twin, loaded):
        (1000 * other(torch.ones(2, 4))).sum().backward()
        assert not any(parameter._backward_hooks for parameter in other.parameters())
    assert monitor._probes["gradients"]._latest == before
    copy.deepcopy(optimizer)


def test_an_output_that_is_saved_while_watched_gives_no_warning(small, watch):
    model, optimizer = small
    watch(model, optimizer)
    torch.save(model(torch.ones(2, 4)), io.BytesIO())


def test_closing_takes_every_hook_back(small, watch):
    model, optimizer = small
    monitor = watch(model, optimizer)
    assert model._forward_hooks
    monitor.close()
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class _DropConnect(nn.Module):
    def forward(self, weight):
        return torch.nn.functional.dropout(weight, 0.2, self.training)


@pytest.mark.parametrize("how", ["spectral", "random"])
def test_weights_that_are_computed_are_not_asked_for(how, watch):
    """To ask for one runs a power iteration, or draws random numbers."""

    def train(watch):
        seed_everything(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 3))
        for layer in (model[0], model[2]):
            if how == "spectral":
                torch.nn.utils.parametrizations.spectral_norm(layer)
            else:
                torch.nn.utils.parametrize.register_parametrization(layer, "weight", _DropConnect())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        monitor = watch(model, optimizer, every=1) if watch else None
        for _ in range(15):
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor:
                monitor.step(loss)
        return torch.cat([each.detach().flatten() for each in model.parameters()]), random_states()

    bare, watched = train(None), train(watch)
    assert torch.equal(bare[0], watched[0])
    assert bare[1] == watched[1]


STATES = """
import random
import sys

def states():
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    of_numpy = None if numpy is None else [str(part) for part in numpy.get_state(legacy=False).items()]
    return random.getstate(), of_numpy, None if torch is None else torch.get_rng_state().tolist()

random.seed(0)
"""

FIRST_WATCH = """
import numpy, torch
torch.manual_seed(0)
numpy.random.seed(0)
before = states()
import forewarn
assert "forewarn.attach" not in sys.modules
assert states() == before, "import"
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = states()

def check(what):
    assert states() == before, what

monitor = forewarn.watch(model, optimizer, "run", every=1, views=VIEWS)
check("watch")
for step in range(4):
    loss = model(torch.ones(1, 2)).sum()
    monitor.combine_losses({"a": loss, "b": loss.square()}).backward()
    monitor.clip_grad_norm_(1.0)
    optimizer.step()
    monitor.log("user/x", 1.0)
    monitor.step(loss if step < 2 else float("nan"))
    check("step")
monitor.end_epoch(val_loss=1.0)
monitor.state_dict()
check("end of an epoch")
monitor.close()
check("close")
updates, gradients = forewarn.WeightUpdateMonitor(), forewarn.GradientMonitor(1)
updates.check_gradients(model, optimizer)
updates.check_updates(model, optimizer)
gradients.update(0, model)
str(gradients.get_summary())
modules = forewarn.ModuleMonitor(lambda step: True)
modules.add_activation_metric("mean")
modules.set_module(model)
modules.begin_step(0)
model(torch.ones(1, 2))
modules.end_step()
modules.close()
check("without watch")
for name in forewarn.__all__:
    getattr(forewarn, name)
check("every public name")
"""


@pytest.mark.parametrize(
    "views",
    ["None", "[forewarn.LiveView()]", "[forewarn.TensorBoardView('board')]", "[forewarn.Prometheus(port=0)]", "[]"],
    ids=str.strip,
)
def test_nothing_of_the_first_run_of_a_process_moves_a_random_state(views, tmp_path):
    """What it imports may draw a number: only a new process shows it."""
    program = STATES + FIRST_WATCH.replace("VIEWS", views)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


@pytest.mark.parametrize(
    "statement",
    [
        "from forewarn.attach import watch", "import forewarn.views.live", "import forewarn.cli.verdict",
        "import forewarn.lab.callbacks", "from forewarn.standalone import ModuleMonitor",
    ],
)  # fmt: skip
def test_no_import_of_a_part_moves_a_random_state(statement, tmp_path):
    program = f"{STATES}\nbefore = random.getstate()\n{statement}\nassert random.getstate() == before"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
