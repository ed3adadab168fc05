"""The refined coordinate check, against matrices multiplied by hand and against the public package."""

import copy
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import forewarn
from forewarn import ModuleMonitor, RefinedCoordinateCheck
from forewarn.lab.gpt import GPT, GPTConfig

WIDTH = 12


def trained(model, *batches, steps=3):
    """The model as it was, and after a few updates."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return reference


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3, bias=False))


def checked(model, reference, batch, package=forewarn, **settings):
    monitor = package.ModuleMonitor(lambda step: True, excluded_modules_regex=settings.pop("excluded", "$.^"))
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = package.RefinedCoordinateCheck(monitor, **settings)
    for step in range(2):
        monitor.begin_step(step)
        with torch.no_grad():
            reference(batch)
        model(batch)
        check.refined_coordinate_check()
        monitor.end_step()
    return monitor.get_step_metrics()


def mean_norm(rows):
    return np.sqrt((rows**2).sum(-1)).mean()


def test_every_term_of_an_mlp_equals_numpy():
    model, batch = mlp(), torch.randn(7, 5)
    reference = trained(model, batch)
    found = checked(model, reference, batch)

    def forward(weights, x):
        """Inputs of the modules, and what LayerNorm multiplies its weight by."""
        first = x @ weights["0.weight"].T + weights["0.bias"]
        second = np.maximum(first, 0)
        normal = (second - second.mean(-1, keepdims=True)) / np.sqrt(second.var(-1, keepdims=True) + 1e-5)
        third = normal * weights["2.weight"] + weights["2.bias"]
        return {"0": x, "1": first, "2": second, "2 normal": normal, "3": third}

    now, then = ({name: each.double().numpy() for name, each in one.state_dict().items()} for one in (model, reference))
    x_t, x_0 = (forward(weights, batch.double().numpy()) for weights in (now, then))
    expected = {}
    for name in ("0", "3"):
        bias_now, bias_then = now.get(f"{name}.bias", 0.0), then.get(f"{name}.bias", 0.0)
        w_t, w_0 = now[f"{name}.weight"].T, then[f"{name}.weight"].T
        update, passed_on = x_t[name] @ (w_t - w_0), (x_t[name] - x_0[name]) @ w_0
        expected |= {
            f"RCC (W_t-W_0)x_t/{name}/l2norm": update + (bias_now - bias_then),
            f"RCC W_0(x_t-x_0)/{name}/l2norm": passed_on,
            f"RCC (W_t-W_0)x_t/{name}.weight/l2norm": update,
            f"RCC W_0(x_t-x_0)/{name}.weight/l2norm": passed_on,
            f"RCC (W_t-W_0)x_t/{name}.weight/W_t x_t/l2norm": x_t[name] @ w_t,
            f"RCC W_0(x_t-x_0)/{name}.weight/W_0 x_0/l2norm": x_0[name] @ w_0,
        }
    gain, first_gain = now["2.weight"], then["2.weight"]
    update, passed_on = x_t["2 normal"] * (gain - first_gain), (x_t["2 normal"] - x_0["2 normal"]) * first_gain
    expected |= {
        "RCC (W_t-W_0)x_t/2/l2norm": update + now["2.bias"] - then["2.bias"],
        "RCC W_0(x_t-x_0)/2/l2norm": passed_on,
        "RCC (W_t-W_0)x_t/2.weight/l2norm": update,
        "RCC W_0(x_t-x_0)/2.weight/l2norm": passed_on,
        "RCC (W_t-W_0)x_t/2.weight/W_t x_t/l2norm": x_t["2 normal"] * gain,
        "RCC W_0(x_t-x_0)/2.weight/W_0 x_0/l2norm": x_0["2 normal"] * first_gain,
        "RCC (W_t-W_0)x_t/2.weight/x_t/l2norm": x_t["2 normal"],
        "RCC W_0(x_t-x_0)/2.weight/x_t-x_0/l2norm": x_t["2 normal"] - x_0["2 normal"],
        "RCC (W_t-W_0)x_t/1/l2norm": np.zeros((7, WIDTH)),
        "RCC W_0(x_t-x_0)/1/l2norm": np.maximum(x_t["1"], 0) - np.maximum(x_0["1"], 0),
    }
    for name in ("0", "1", "2", "3"):
        expected[f"RCC x_t/{name}/l2norm"] = x_t[name]
        expected[f"RCC (x_t-x_0)/{name}/l2norm"] = x_t[name] - x_0[name]
    assert found.keys() == expected.keys()
    for key, rows in expected.items():
        assert found[key] == pytest.approx(mean_norm(rows), rel=1e-4, abs=1e-6), key
    assert found["RCC (W_t-W_0)x_t/3/l2norm"] > 0.01


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, WIDTH)

    def forward(self, tokens):
        return self.embedding(tokens)


def test_an_embedding_logs_only_the_rows_that_its_updates_changed():
    model, tokens = Words(), torch.tensor([[0, 1, 1], [2, 3, 5]])
    reference = trained(model, tokens)
    moved = (model.embedding.weight - reference.embedding.weight).detach().double().numpy()
    assert checked(model, reference, tokens) == {
        "RCC (W_t-W_0)x_t/embedding/l2norm": pytest.approx(mean_norm(moved[tokens.numpy()]), rel=1e-5)
    }


@pytest.mark.parametrize("make", ["mlp", "gpt", "cnn"])
def test_every_key_equals_that_of_the_public_package(make):
    public = pytest.importorskip("torch_module_monitor")
    torch.manual_seed(0)
    model, batch = {
        "mlp": lambda: (mlp(), torch.randn(7, 5)),
        "gpt": lambda: (GPT(GPTConfig(vocab_size=11, context=6, width=16, depth=2)), torch.randint(11, (3, 6))),
        "cnn": lambda: (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
            torch.randn(5, 1, 6, 6),
        ),
    }[make]()
    reference = trained(model, batch)
    # The public package fails on a module that is called twice, as the dropout of each block is.
    theirs, ours = (
        checked(copy.deepcopy(model), copy.deepcopy(reference), batch, package, excluded=r".*dropout")
        for package in (public, forewarn)
    )
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("order", ["reference first", "model first", "reference unmonitored", "model unmonitored last"])
def test_every_way_to_write_the_loop_gives_the_same(order):
    model, batch = mlp(), torch.randn(7, 5)
    reference = trained(model, batch)
    expected = checked(model, reference, batch)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    if order == "reference unmonitored":
        with monitor.no_monitor():
            reference(batch)
    elif order != "model first":
        reference(batch)
    model(batch)
    if order == "model first":
        reference(batch)
    if order == "model unmonitored last":
        with monitor.no_monitor():
            model(torch.randn(2, 5))
    check.refined_coordinate_check()
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx(expected, rel=1e-6)


def test_micro_batches_count_by_their_rows():
    model, batch = mlp(), torch.randn(9, 5)
    reference = trained(model, batch)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    for part in batch.split([2, 7]):
        reference(part)
        model(part)
        check.refined_coordinate_check()
        monitor.after_micro_batch()
    monitor.end_step()
    assert monitor.get_step_metrics() == pytest.approx(checked(model, reference, batch), rel=1e-5)


def test_modules_narrows_it_down_by_name():
    model, batch = mlp(), torch.randn(7, 5)
    reference = trained(model, batch)
    everything = checked(model, reference, batch)
    found = checked(model, reference, batch, modules=r"[03]$")
    assert found == {key: value for key, value in everything.items() if key.split("/")[1][0] in "03"}


class Twice(nn.Module):
    """One layer that is called twice, by keyword, between an in-place change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.pair = Pair()

    def forward(self, x):
        once = self.layer(input=x)
        self.pair(x)
        return self.layer(once.relu_())


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_a_layer_that_is_called_twice_counts_call_by_call():
    torch.manual_seed(0)
    model, batch = Twice(), torch.randn(3, 4)
    reference = trained(model, batch)
    found = checked(model, reference, batch)
    with torch.no_grad():
        x_t = [batch, model.layer(batch).relu()]
        moved = model.layer.weight - reference.layer.weight
        updates = torch.cat([functional.linear(x, moved) for x in x_t])
        assert found["RCC (W_t-W_0)x_t/layer.weight/l2norm"] == pytest.approx(
            updates.norm(dim=-1).mean().item(), rel=1e-4
        )
        assert found["RCC x_t/layer/l2norm"] == pytest.approx(torch.cat(x_t).norm(dim=-1).mean().item(), rel=1e-5)
    assert not [key for key in found if "pair" in key]


@pytest.mark.parametrize(
    ("absent", "word"),
    [("module", "Set the module to monitor before"), ("reference", "Set the reference module before")],
)
def test_a_monitor_without_one_of_both_says_which(absent, word):
    monitor = ModuleMonitor()
    if absent == "reference":
        monitor.set_module(mlp())
    with pytest.raises(ValueError, match=word):
        RefinedCoordinateCheck(monitor)


def test_a_missing_forward_is_named_and_an_unmonitored_step_is_none():
    monitor = ModuleMonitor(lambda step: step == 1)
    model, reference = mlp(), mlp()
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    check.refined_coordinate_check()
    monitor.end_step()
    monitor.begin_step(1)
    with pytest.raises(ValueError, match="No inputs found for the monitored module"):
        check.refined_coordinate_check()
    model(torch.randn(2, 5))
    with pytest.raises(ValueError, match="No inputs found for the reference module"):
        check.refined_coordinate_check()
    monitor.set_reference_module(mlp())
    with pytest.raises(ValueError, match="reference module has changed"):
        check.refined_coordinate_check()
    monitor.remove_reference_module()
    with pytest.raises(ValueError, match="Set the reference module"):
        check.refined_coordinate_check()


def test_inputs_that_do_not_match_never_end_the_training(caplog):
    monitor = ModuleMonitor(lambda step: True)
    model, reference = mlp(), mlp()
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    for step in range(2):
        monitor.begin_step(step)
        reference(torch.randn(2, 5))
        model(torch.randn(3, 5))
        check.refined_coordinate_check()
        monitor.end_step()
    warned = [record for record in caplog.records if "check: 0 failed and is left out" in record.getMessage()]
    assert len(warned) == 1


def test_training_with_dropout_and_batch_norm_stays_bit_identical():
    def train(is_checked):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 2)
        )
        reference = copy.deepcopy(model).eval()
        monitor = ModuleMonitor(lambda step: True)
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        check = RefinedCoordinateCheck(monitor) if is_checked else None
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(5):
            batch = torch.randn(6, 5)
            if check:
                monitor.begin_step(step)
                with torch.no_grad():
                    reference(batch)
            model(batch).square().mean().backward()
            if check:
                check.refined_coordinate_check()
                monitor.end_step()
            optimizer.step()
            optimizer.zero_grad()
        return [*model.state_dict().values(), torch.rand(3)]

    for bare, watched in zip(train(False), train(True), strict=True):
        assert torch.equal(bare, watched)


def test_statistics_of_a_batch_norm_reference_stay_as_its_own_forward_left_them():
    model = nn.Sequential(nn.BatchNorm1d(5))
    reference = copy.deepcopy(model)
    batch = torch.randn(6, 5)
    twin = copy.deepcopy(reference)
    twin(batch), twin(batch)
    checked(model, reference, batch)
    for ours, theirs in zip(reference.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def held(num_elements):
    """How many tensors of so many elements there are."""
    gc.collect()
    storages = {
        each.data_ptr() for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.numel() == num_elements
    }
    return len(storages)


@pytest.mark.filterwarnings("ignore")  # reading every object of the interpreter touches deprecated ones
def test_with_the_reference_first_no_activation_of_the_model_is_kept_and_one_copy_of_the_references():
    depth, rows, width = 6, 31, 37
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
    reference = copy.deepcopy(model)
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    batch = torch.randn(rows, width)
    with torch.no_grad():
        reference(batch)
        assert held(rows * width) == 1 + depth + 1  # the batch itself, and what goes into and out of the layers, once
        model(batch)
    assert held(rows * width) == 1
    check.refined_coordinate_check()
    monitor.end_step()
    assert len(monitor.get_step_metrics()) == 8 * depth


@pytest.mark.parametrize("end", ["check", "monitor", "reference"])
def test_after_close_no_hook_is_left_and_nothing_is_kept(end):
    model, reference = mlp(), mlp()
    monitor = ModuleMonitor(lambda step: step == 0)
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    check = RefinedCoordinateCheck(monitor)
    monitor.begin_step(0)
    reference(torch.randn(2, 5))
    if end == "check":
        check.close()
        monitor.end_step()
    elif end == "monitor":
        monitor.close()
    else:
        monitor.remove_reference_module()
        monitor.end_step()
    assert not [each for side in (model, reference) for each in side.modules() if each._forward_hooks]
    check.close()


def test_a_pattern_that_matches_nothing_is_named():
    monitor = ModuleMonitor(lambda step: True)
    monitor.set_module(mlp())
    monitor.set_reference_module(mlp())
    with pytest.raises(ValueError, match="modules='layer' matches none"):
        RefinedCoordinateCheck(monitor, modules="layer")
