"""`forewarn.integrations.accelerate.watch` in loops with the real library."""

import importlib
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import forewarn
from forewarn.integrations.accelerate import watch
from tests.bitwise import plain, random_states, seed_everything
from tests.integrations.tiny import everything, ratios, series, weights

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

NUM_BATCHES, NUM_MICRO_BATCHES = 11, 3
"""The last step has only two of its micro-batches."""


@pytest.fixture(autouse=True)
def _new_accelerator():
    """Accelerate keeps its settings in one place for the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 1))


def dataset(number: int) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(number, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :2].prod(1, keepdim=True) + 0.2 * inputs[:, 2:3])


def prepared(accelerator: Accelerator, dropout: float = 0.0, num_rows: int = 8 * NUM_BATCHES):
    model = network(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(dataset(num_rows), 8))


def train(accelerator, model, optimizer, loader, monitor=None, *, limit=0.3, before_step=None, epochs=1):
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                if before_step is not None:
                    before_step(inputs, targets)
                if accelerator.sync_gradients and limit:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
                if monitor is not None:
                    monitor.step(loss)


@pytest.mark.parametrize(("mixed_precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-2)])
def test_readings_equal_a_computation_in_float64(tmp_path, mixed_precision, tolerance):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO_BATCHES, mixed_precision=mixed_precision)
    model, optimizer, loader = prepared(accelerator)
    losses, norms, moved, micro_batches = [], [], [], []

    def compute(inputs, targets):
        """In float64, when the optimizer is about to step."""
        micro_batches.append((inputs.double(), targets.double()))
        if not accelerator.sync_gradients:
            return
        twin = network().double()
        twin.load_state_dict(model.state_dict())
        parts = [(twin(x) - y).square().mean() for x, y in micro_batches]
        (sum(parts) / NUM_MICRO_BATCHES).backward()
        losses.append(sum(part.item() for part in parts) / len(parts))
        norms.append(math.sqrt(sum(parameter.grad.square().sum().item() for parameter in twin.parameters())))
        moved.append(weights(twin))
        micro_batches.clear()

    with watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        train(accelerator, model, optimizer, loader, monitor, before_step=compute, epochs=2)
        assert monitor.at == 8
    moved.append(weights(model))
    run = tmp_path / "run"
    assert max(norms) > 0.3
    assert series(run, "train/loss") == pytest.approx(losses, rel=tolerance)
    assert series(run, "gradient/global_norm") == pytest.approx(norms, rel=tolerance)
    clipped = [min(norm, 0.3) for norm in norms]
    assert series(run, "gradient/global_norm_clipped") == pytest.approx(clipped, rel=tolerance)
    assert series(run, "train/clip") == pytest.approx([0.3] * 8)
    assert series(run, "train/lr", "0") == pytest.approx([5e-3] * 8)
    assert series(run, "gradient/backward_passes") == [3, 3, 3, 2] * 2
    for name in moved[0]:
        true = [ratios(before, after)[name] for before, after in itertools.pairwise(moved)]
        assert series(run, "update/ratio", name) == pytest.approx(true, rel=1e-3)


def test_training_is_bit_identical_with_and_without(tmp_path):
    def outcome(watched):
        seed_everything(3)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = prepared(accelerator, dropout=0.2)
        monitor = watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) if watched else None
        train(accelerator, model, optimizer, loader, monitor)
        if monitor is not None:
            monitor.close()
            assert "clip_grad_norm_" not in vars(accelerator)
        return plain(model.state_dict()), plain(optimizer.state_dict()), random_states()

    assert outcome(False) == outcome(True)


def test_a_skipped_step_is_known_and_gradients_are_read_unscaled(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    model, optimizer, loader = prepared(accelerator)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # which it allows on a GPU only
    norms, skipped = [], []
    with watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        for step, (inputs, targets) in enumerate(loader):
            loss = (model(inputs) - targets).square().mean() * (math.inf if step == 4 else 1.0)
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
            monitor.step(loss)
    assert skipped == [step == 4 for step in range(NUM_BATCHES)]
    assert series(tmp_path / "run", "update/skipped") == skipped
    del norms[4]
    assert series(tmp_path / "run", "gradient/global_norm") == pytest.approx(norms, rel=1e-5)


def test_a_nan_is_named(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator)
    dataset = loader.dataset.tensors[1]
    dataset[8 * 6] = math.nan  # in the first micro-batch of step 3
    with watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        train(accelerator, model, optimizer, loader, monitor)
        assert ("non-finite-loss", 3) in [(alert.name, alert.since) for alert in monitor.alerts]


def test_a_checkpoint_of_the_accelerator_resumes_the_run_without_a_gap(tmp_path):
    def start(name, resume=False):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, loader = prepared(accelerator, num_rows=32)
        monitor = watch(accelerator, model, optimizer, tmp_path / name, every=1, views=[], resume=resume)
        accelerator.register_for_checkpointing(monitor)
        return accelerator, model, optimizer, loader, monitor

    for name in ("whole", "broken"):
        parts = start(name)
        train(*parts)
        parts[0].save_state(str(tmp_path / f"{name}.saved"))
        train(*parts)
        parts[-1].close()
    parts = start("broken", resume=True)
    parts[0].load_state(str(tmp_path / "broken.saved"))
    train(*parts)
    parts[-1].close()
    assert everything(tmp_path / "broken") == everything(tmp_path / "whole")
    with forewarn.open_run(tmp_path / "broken") as run:
        assert run.series("monitor/resumed").steps.tolist() == [2]


def test_clipping_a_part_of_the_model_is_not_taken_for_the_whole_norm(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    norms = []
    with watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            norms.append(math.sqrt(sum(each.grad.double().square().sum().item() for each in model.parameters())))
            accelerator.clip_grad_norm_(model[0].parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    assert series(tmp_path / "run", "gradient/global_norm") == pytest.approx(norms, rel=1e-5)


def test_two_models_that_are_clipped_apart_are_read_as_one_run(tmp_path):
    accelerator = Accelerator(cpu=True)
    models = {"G": nn.Linear(3, 6), "D": network()}
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values()]
    generator, discriminator, *optimizers = accelerator.prepare(*models.values(), *optimizers)
    norms = []
    with watch(accelerator, models, optimizers, tmp_path / "run", every=1, views=[]) as monitor:
        for _ in range(6):
            made = generator(torch.randn(8, 3))
            real, fake = discriminator(torch.randn(8, 6)), discriminator(made.detach())
            discriminator_loss = (real - 1).square().mean() + fake.square().mean()
            accelerator.backward(discriminator_loss)
            parts = [accelerator.clip_grad_norm_(discriminator.parameters(), 0.5).item()]
            optimizers[1].step()
            optimizers[1].zero_grad()
            generator_loss = (discriminator(made) - 1).square().mean()
            accelerator.backward(generator_loss)
            parts.append(accelerator.clip_grad_norm_(generator.parameters(), 0.5).item())
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            monitor.step(discriminator_loss + generator_loss)
            norms.append(math.hypot(*parts))
    assert series(tmp_path / "run", "gradient/global_norm") == pytest.approx(norms, rel=1e-5)


def test_a_healthy_run_raises_no_alert(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = prepared(accelerator)
    with watch(accelerator, model, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        train(accelerator, model, optimizer, loader, monitor, epochs=20, limit=None)
        assert monitor.alerts == ()
    losses = series(tmp_path / "run", "train/loss")
    assert losses[-1] < losses[0] / 2


def test_the_end_of_the_training_closes_the_run(tmp_path):
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator)
    train(accelerator, model, optimizer, loader, watch(accelerator, model, optimizer, tmp_path / "run", views=[]))
    accelerator.end_training()
    with forewarn.open_run(tmp_path / "run") as run:
        assert run.end[0] == "completed"
    assert "end_training" not in vars(accelerator)
    with pytest.raises(ZeroDivisionError), watch(accelerator, model, optimizer, tmp_path / "raised", views=[]):
        raise ZeroDivisionError("by zero")
    with forewarn.open_run(tmp_path / "raised") as run:
        assert run.end[0] == "ZeroDivisionError: by zero"


def test_two_processes_started_by_accelerate_launch_record_one_run(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    script = ["-m", "tests.integrations.launched_loop", str(tmp_path)]
    done = subprocess.run([*launch, *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run, expected = tmp_path / "run", json.loads((tmp_path / "expected.json").read_text())
    assert series(run, "train/loss") == pytest.approx(expected["losses"], rel=1e-5)
    assert series(run, "gradient/global_norm") == pytest.approx(expected["norms"], rel=1e-4)
    clipped = [min(norm, 0.3) for norm in expected["norms"]]
    assert series(run, "gradient/global_norm_clipped") == pytest.approx(clipped, rel=1e-4)
    with forewarn.open_run(run) as stored:
        assert stored.end[0] == "completed"
        assert stored.alerts() == []


def test_wrong_arguments_are_one_sentence(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"accelerator must be an accelerate.Accelerator, not Sequential; call watch\("):
        watch(model, optimizer, "runs/mine")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with watch(accelerator, model, optimizer, tmp_path / "run", views=[]) as monitor:
        with accelerator.accumulate(model):
            monitor.step(torch.ones(3))
        with (
            accelerator.accumulate(model),
            pytest.raises(ValueError, match="loss must be one number, but it is a tensor of shape"),
        ):
            monitor.step(torch.ones(3))


@pytest.mark.parametrize(("module", "library", "extra"), [
    ("accelerate", "accelerate", "accelerate"),
    ("huggingface", "transformers", "huggingface"),
])  # fmt: skip
def test_a_missing_library_is_one_sentence_with_the_line_to_install_it(monkeypatch, module, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"forewarn.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {library}.*: pip install 'forewarn\[{extra}\]'"):
        importlib.import_module(f"forewarn.integrations.{module}")
