"""Loops that do not call the watched module: their passes are found, and their readings are true."""

import math

import pytest
import torch
from torch import nn

import forewarn
from forewarn.types import Reason


def true_norm(parameters):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def stack(inputs, hidden, outputs):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Stack(nn.Module):
    """The same in a class of one's own: torch 2.6 does not compile a `Sequential` in place."""

    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        self.layers = stack(inputs, hidden, outputs)

    def forward(self, x):
        return self.layers(x)


class Gan(nn.Module):
    """Both players in one module; only the generator runs in its own `forward`."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = stack(4, 16, 8), stack(8, 16, 1)

    def forward(self, noise):
        return self.generator(noise)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = stack(8, 16, 6), nn.Linear(6, 3)

    def compute_loss(self, x, y):
        return nn.functional.cross_entropy(self.decoder(self.encoder(x)), y)


class Functional(nn.Linear):
    """Uses its parameters without calling any module."""

    def compute_loss(self, x, y):
        return nn.functional.cross_entropy(nn.functional.linear(x, self.weight, self.bias), y)


class HeadOutside(nn.Module):
    """Its `forward` returns features; the loop calls the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = stack(8, 16, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.body(x)

    def compute_loss(self, x, y):
        return nn.functional.cross_entropy(self.head(self(x)), y)


def read(monitor, name, scope=""):
    monitor.close()
    with forewarn.open_run(monitor.path) as run:
        return run.series(name, scope).values.tolist()


def codes(monitor):
    return {alert.code for alert in monitor.alerts} - {"X103"}


def train_gan(monitored, generator, discriminator, optimizers, generate, steps=30, zero=True, first="D"):
    """Both players' turns in one step, as the DCGAN example has them, or the generator first."""
    of_generator, of_discriminator = optimizers
    norms = {"G": [], "D": []}
    loss_of = nn.BCEWithLogitsLoss()
    for _ in range(steps):
        fake = generate(torch.randn(32, 4))

        def discriminator_turn(fake=fake):
            if zero:
                discriminator.zero_grad()
            loss_of(discriminator(torch.randn(32, 8)), torch.ones(32, 1)).backward()
            loss_of(discriminator(fake.detach()), torch.zeros(32, 1)).backward()
            norms["D"].append(true_norm(discriminator.parameters()))
            of_discriminator.step()

        def generator_turn(fake=fake):
            generator.zero_grad()
            loss = loss_of(discriminator(fake), torch.ones(32, 1))
            loss.backward()
            norms["G"].append(true_norm(generator.parameters()))
            of_generator.step()
            return loss

        if first == "D":
            discriminator_turn()
        loss = generator_turn()
        if first == "G":
            discriminator_turn()
        monitored.step(loss)
    return norms


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("first", ["D", "G"])
def test_a_gan_in_one_module_is_read_whole_and_per_player(tmp_path, first):
    gan = Gan()
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (gan.generator, gan.discriminator)]
    monitor = forewarn.watch(gan, optimizers, tmp_path / "run", views=[])
    norms = train_gan(monitor, gan.generator, gan.discriminator, optimizers, gan, first=first)
    together = [math.hypot(*both) for both in zip(norms["G"], norms["D"], strict=True)]
    assert read(monitor, "gradient/global_norm") == pytest.approx(together, rel=1e-5)
    assert read(monitor, "gradient/optimizer_norm", "generator") == pytest.approx(norms["G"], rel=1e-5)
    assert read(monitor, "gradient/optimizer_norm", "discriminator") == pytest.approx(norms["D"], rel=1e-5)
    with forewarn.open_run(monitor.path) as run:
        assert {"generator.0", "discriminator.0"} <= set(run.scopes("activation/mean"))
    assert codes(monitor) == set()


def test_two_models_are_one_run_from_the_first_step_on(tmp_path):
    generator, discriminator = stack(4, 16, 8), stack(8, 16, 1)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (generator, discriminator)]
    models = {"G": generator, "D": discriminator}
    monitor = forewarn.watch(models, optimizers, tmp_path / "run", views=[])
    norms = train_gan(monitor, generator, discriminator, optimizers, generator)
    together = [math.hypot(*both) for both in zip(norms["G"], norms["D"], strict=True)]
    assert read(monitor, "gradient/global_norm") == pytest.approx(together, rel=1e-5)
    assert read(monitor, "gradient/optimizer_norm", "D") == pytest.approx(norms["D"], rel=1e-5)
    with forewarn.open_run(monitor.path) as run:
        assert run.info.model == "G (Sequential) + D (Sequential)"
        assert set(run.scopes("gradient/norm")) == {
            f"{player}.{layer}.{kind}" for player in "GD" for layer in (0, 2) for kind in ("weight", "bias")
        }
        assert {"G.0", "G.1", "D.0"} <= set(run.scopes("activation/mean"))
        assert "monitor/unavailable" not in run.names() or "gradient/global_norm" not in run.scopes(
            "monitor/unavailable"
        )
    assert codes(monitor) == set()


def test_a_player_whose_gradients_are_never_cleared_is_still_reported(tmp_path):
    gan = Gan()
    optimizers = [torch.optim.Adam(part.parameters(), 1e-3) for part in (gan.generator, gan.discriminator)]
    monitor = forewarn.watch(gan, optimizers, tmp_path / "run", views=[])
    train_gan(monitor, gan.generator, gan.discriminator, optimizers, gan, zero=False)
    assert "G109" in codes(monitor)


def test_a_generator_that_steps_less_often_has_neither_forgotten_gradients_nor_frozen_weights(tmp_path):
    generator, critic = stack(4, 16, 8), stack(8, 16, 1)
    of_generator, of_critic = (torch.optim.Adam(model.parameters(), 1e-4) for model in (generator, critic))
    monitor = forewarn.watch(
        {"G": generator, "D": critic}, [of_generator, of_critic], tmp_path / "run", every=1, views=[]
    )
    for step in range(40):
        of_critic.zero_grad()
        fake = generator(torch.randn(32, 4))
        loss = critic(fake.detach()).mean() - critic(torch.randn(32, 8)).mean()
        loss.backward()
        of_critic.step()
        if step % 5 == 4:
            of_generator.zero_grad()
            (-critic(fake).mean()).backward()
            of_generator.step()
        monitor.step(loss)
    assert "G109" not in codes(monitor)
    assert not [alert for alert in monitor.alerts if alert.code == "U101" and alert.scope.startswith("G.")]


def train_supervised(model, monitor, optimizer, steps=40, clip=None, factor=lambda step: 1.0):
    norms = []
    for step in range(steps):
        x = torch.randn(32, 8)
        loss = model.compute_loss(x, x[:, :3].argmax(1))
        optimizer.zero_grad()
        (loss * factor(step)).backward()
        norms.append(true_norm(model.parameters()))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        monitor.step(loss)
    return norms


@pytest.mark.parametrize(("kind", "first"), [(WithoutForward, 0), (HeadOutside, 0), (lambda: Functional(8, 3), 1)])
def test_the_norm_is_true_whatever_the_loop_calls(tmp_path, kind, first):
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    norms = train_supervised(model, monitor, optimizer, clip=0.1)
    assert read(monitor, "gradient/global_norm")[first:] == pytest.approx(norms[first:], rel=1e-5)
    assert codes(monitor) == set()


def test_a_first_step_whose_pass_was_missed_is_marked_as_read_after_clipping(tmp_path):
    model = Functional(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    train_supervised(model, monitor, optimizer, steps=3, clip=0.1)
    assert read(monitor, "gradient/global_norm")[0] == pytest.approx(0.1, rel=1e-4)
    assert read(monitor, "monitor/unavailable", "gradient/global_norm") == [Reason.AFTER_CLIPPING, Reason.AVAILABLE]


def test_the_modules_that_do_run_are_found_and_their_activations_read(tmp_path):
    model = WithoutForward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    seen = {}
    for part in (model.encoder, model.decoder):
        part.register_forward_hook(lambda module, args, output: seen.update({module: float(output.detach().mean())}))
    train_supervised(model, monitor, optimizer, steps=3)
    monitor.close()
    with forewarn.open_run(monitor.path) as run:
        assert run.series("activation/mean", "encoder.2").steps.tolist() == [0, 1, 2]
        assert run.series("activation/mean", "encoder.2").values[-1] == pytest.approx(seen[model.encoder], rel=1e-4)
        assert run.series("activation/mean", "decoder").values[-1] == pytest.approx(seen[model.decoder], rel=1e-4)


@pytest.mark.parametrize("kind", [WithoutForward, lambda: Functional(8, 3)])
def test_a_thousandfold_gradient_is_reported_although_the_model_is_never_called(tmp_path, kind):
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    train_supervised(model, monitor, optimizer, steps=160, factor=lambda step: 1000.0 if step == 150 else 1.0)
    assert codes(monitor) & {"G102", "G104"}


def test_gradients_that_come_from_no_backward_pass_are_read_at_the_optimizer_step(tmp_path):
    model = stack(4, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    norms = []
    for _ in range(40):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        norms.append(true_norm(model.parameters()))
        optimizer.step()
        monitor.step(1.0)
    assert read(monitor, "gradient/global_norm") == pytest.approx(norms, rel=1e-5)


def test_the_search_leaves_no_hooks_where_the_loop_calls_the_model(tmp_path):
    model = stack(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", every=lambda step: False, views=[])
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        assert all(not module._forward_pre_hooks for module in model)
        assert all(parameter._backward_hooks is None for parameter in model.parameters())
        monitor.step(loss)
    monitor.close()


def test_after_a_search_only_what_is_needed_keeps_its_hooks_and_close_removes_them(tmp_path):
    model, functional = WithoutForward(), Functional(8, 3)
    for watched in (model, functional):
        optimizer = torch.optim.SGD(watched.parameters(), 0.1)
        monitor = forewarn.watch(watched, optimizer, tmp_path / type(watched).__name__, views=[])
        train_supervised(watched, monitor, optimizer, steps=12)
        hooked = {name for name, module in watched.named_modules() if module._forward_pre_hooks}
        by_parameter = [bool(parameter._backward_hooks) for parameter in watched.parameters()]
        if watched is model:
            assert hooked == {"", "encoder", "decoder"}
            assert not any(by_parameter)
        else:
            assert all(by_parameter)
        monitor.close()
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in watched.modules())
        assert all(parameter._backward_hooks is None for parameter in watched.parameters())


@pytest.mark.parametrize("kind", [WithoutForward, HeadOutside, lambda: Functional(8, 3)])
def test_training_is_bit_identical_while_passes_are_searched_for(tmp_path, kind):
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[]) if watched else _Nothing()
        train_supervised(model, monitor, optimizer, steps=12, clip=0.5)
        weights.append([parameter.detach().clone() for parameter in model.parameters()] + [torch.get_rng_state()])
    assert all(map(torch.equal, *weights))


class _Nothing:
    def step(self, loss):
        pass


def test_a_loss_weight_that_is_learned_outside_the_model_is_not_a_forgotten_gradient(tmp_path):
    model, log_variance = stack(8, 16, 4), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), log_variance], 1e-3)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    for _ in range(30):
        x = torch.randn(32, 8)
        errors = (model(x) - x[:, :4]).square().mean(0).view(2, 2).mean(1)
        loss = (errors * (-log_variance).exp() + log_variance).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert codes(monitor) == set()


def test_a_part_of_the_model_can_be_watched_with_the_optimizer_of_all(tmp_path):
    encoder, decoder = stack(8, 16, 6), nn.Linear(6, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    monitor = forewarn.watch(encoder, optimizer, tmp_path / "run", views=[])
    norms = []
    for _ in range(30):
        x = torch.randn(32, 8)
        loss = (decoder(encoder(x)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(true_norm(encoder.parameters()))
        optimizer.step()
        monitor.step(loss)
    assert read(monitor, "gradient/global_norm") == pytest.approx(norms, rel=1e-5)
    assert codes(monitor) == set()


@pytest.mark.parametrize("how", ["in place", "afterwards"])
def test_a_model_that_is_compiled_after_watch_keeps_its_norm_without_a_new_graph(tmp_path, how):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    model = Stack(8, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    called = model
    if how == "in place":
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
    norms = []
    for _ in range(12):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(called(x), x[:, :3].argmax(1))
        loss.backward()
        norms.append(true_norm(model.parameters()))
        optimizer.step()
        monitor.step(loss)
    assert read(monitor, "gradient/global_norm") == pytest.approx(norms, rel=1e-5)
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Profiler")
def test_a_compiled_optimizer_step_is_seen_and_has_no_more_graph_breaks_than_without(tmp_path):
    from torch._dynamo.utils import counters

    breaks = []
    for watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = stack(8, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        monitor = forewarn.watch(model, optimizer, tmp_path / "run", every=1, views=[]) if watched else _Nothing()
        update = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="eager")
        for _ in range(12):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
            update()
            monitor.step(loss)
        breaks.append((sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]))
    assert breaks[0] == breaks[1]
    assert codes(monitor) == set()
    assert all(ratio > 0 for ratio in read(monitor, "update/ratio", "0.weight"))


def test_the_mode_of_the_model_counts_and_not_that_of_its_wrapper(tmp_path):
    model = nn.DataParallel(stack(8, 16, 3))
    model.eval()
    model.module.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = forewarn.watch(model, optimizer, tmp_path / "run", views=[])
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        monitor.step(loss)
    assert len(read(monitor, "activation/mean", "0")) == 2
