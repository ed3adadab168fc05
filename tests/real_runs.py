"""Small real training runs: healthy ones of four kinds, and one broken in a known way for every rule."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

import forewarn
from forewarn.lab.data import TokenBatches, bursts, classification, images, sequences, stdlib_text
from forewarn.lab.dual_task import DualTaskLSTM
from forewarn.lab.gpt import GPT, GPTConfig
from forewarn.lab.networks import CNN, MLP, LSTMClassifier
from forewarn.measure.metric_kinds import ModuleMetric
from forewarn.views.task_lines import TaskView

Batches = Iterator[tuple[Tensor, Tensor]]


def shuffled(inputs: Tensor, targets: Tensor, seed: int, size: int = 32) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    while True:
        which = torch.randint(len(inputs), (size,), generator=generator)
        yield inputs[which], targets[which]


def make_gpt(seed: int) -> tuple[nn.Module, Batches, float]:
    model = GPT(GPTConfig(context=32, depth=2, heads=2, width=48, dropout=0.1))
    return model, iter(TokenBatches(stdlib_text(400_000), batch_size=8, context=32, seed=seed)), 1e-3


def make_mlp(seed: int) -> tuple[nn.Module, Batches, float]:
    return MLP([16, 64, 64, 5]), shuffled(*classification(2000, 16, 5, seed=seed), seed), 1e-3


def make_cnn(seed: int) -> tuple[nn.Module, Batches, float]:
    return CNN([1, 8, 16], 4), shuffled(*images(600, 4, seed=seed), seed), 1e-3


def make_lstm(seed: int) -> tuple[nn.Module, Batches, float]:
    data = sequences(1000, 12, 3, seed=seed)
    return LSTMClassifier(data[0].shape[-1], 32, 3), shuffled(*data, seed), 3e-3


KINDS: dict[str, Callable[[int], tuple[nn.Module, Batches, float]]] = {
    "gpt": make_gpt,
    "mlp": make_mlp,
    "cnn": make_cnn,
    "lstm": make_lstm,
}


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def healthy(
    kind: str, seed: int, run: Path, steps: int = 200, metrics: Sequence[ModuleMetric] = ()
) -> forewarn.Monitor:
    """A run as people train: AdamW, warm-up and cosine, clipping."""
    torch.manual_seed(seed)
    model, batches, peak = KINDS[kind](seed)
    optimizer = AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    warm_up = steps // 10

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    with forewarn.watch(model, optimizer, run, every=5, metrics=metrics) as monitor:
        for _ in range(steps):
            loss = loss_of(model, *next(batches))
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor


class Breakable:
    """An MLP in training that a fault may change at any point of the loop."""

    def __init__(
        self,
        run: Path,
        model: nn.Module | None = None,
        lr: float = 1e-3,
        parameters: Callable[[nn.Module], Any] = lambda model: model.parameters(),
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or MLP([16, 64, 64, 64, 5])
        self.optimizer = AdamW(parameters(self.model), lr=lr, **settings)
        self.batches = shuffled(*classification(2000, 16, 5, seed=0), 0)
        self.run = run
        self.config = forewarn.Config()
        self.metrics: Sequence[ModuleMetric] = ()
        self.resume = False
        self.clip: float | None = 1.0
        self.zero_grad = self.step_optimizer = True
        self.change_batch: Callable[[int, Tensor], Tensor] = lambda step, inputs: inputs
        self.change_loss: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
        self.before_step: Callable[[int], None] = lambda step: None
        self.after_update: Callable[[int], None] = lambda step: None
        self.after_attach: Callable[[forewarn.Monitor], None] = lambda monitor: None

    def linears(self) -> list[nn.Linear]:
        return [module for module in self.model.modules() if isinstance(module, nn.Linear)]

    def train(self, steps: int = 160) -> forewarn.Monitor:
        with forewarn.watch(
            self.model, self.optimizer, self.run, every=5, config=self.config, resume=self.resume,
            metrics=self.metrics,
        ) as monitor:  # fmt: skip
            self.after_attach(monitor)
            for step in range(steps):
                self.before_step(step)
                inputs, targets = next(self.batches)
                loss = loss_of(self.model, self.change_batch(step, inputs), targets)
                self.change_loss(step, loss).backward()
                if self.clip:
                    monitor.clip_grad_norm_(self.clip)
                if self.step_optimizer:
                    self.optimizer.step()
                self.after_update(step)
                if self.zero_grad:
                    self.optimizer.zero_grad()
                monitor.step(loss)
        return monitor


WHEN = 120
"""The step at which a fault that comes on the way comes; one that is measured in detail."""


def nan_in_a_batch(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_batch = lambda step, inputs: inputs * math.nan if step == WHEN else inputs
    return it.train()


def one_absurd_batch(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_batch = lambda step, inputs: inputs * 50 if step == WHEN else inputs
    return it.train()


def weights_that_wander_off(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def wander(step: int) -> None:
        if step >= WHEN:
            with torch.no_grad():
                for parameter in it.model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=2e-4 * (step - WHEN))

    it.before_step = wander
    return it.train(WHEN + 200)


def nan_in_the_backward_pass(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def poison(step: int) -> None:
        if step == WHEN:
            it.linears()[1].weight.register_hook(lambda gradient: gradient * math.nan)

    it.before_step = poison
    return it.train()


def loss_summed_over_everything(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_loss = lambda step, loss: loss * 32 * 1000
    return it.train(60)


def loss_scaled_to_nothing(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_loss = lambda step, loss: loss * 1e-6
    return it.train(60)


class _Residual(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner = MLP([16, 64, 16])
        self.scale = scale

    def forward(self, features: Tensor) -> Tensor:
        return features + self.scale * self.inner(features)


def branches_of_unequal_scale(run: Path) -> forewarn.Monitor:
    blocks = nn.Sequential(*(_Residual(scale) for scale in (1.0, 1.0, 0.001, 1.0)))
    return Breakable(run, nn.Sequential(blocks, nn.Linear(16, 5))).train(60)


def loss_averaged_twice_on_the_way(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.optimizer = torch.optim.SGD(it.model.parameters(), lr=1e-3)
    it.change_loss = lambda step, loss: loss / 200 if step >= 60 else loss
    return it.train(120)


class _Amplified(torch.autograd.Function):
    """Passes values on as they are, and gradients multiplied."""

    @staticmethod
    def forward(context: Any, values: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.factor, None


class _Amplifier(_Residual):
    factor = 1.0

    def forward(self, features: Tensor) -> Tensor:
        return _Amplified.apply(super().forward(features), self.factor)


def blocks_that_amplify_more_and_more(run: Path) -> forewarn.Monitor:
    blocks = nn.Sequential(*(_Amplifier(0.1) for _ in range(8)))
    it = Breakable(run, nn.Sequential(blocks, nn.Linear(16, 5)))

    def amplify(step: int) -> None:
        for block in blocks:
            block.factor = 1.0 + 0.0045 * max(0, step - 60)

    it.before_step = amplify
    return it.train(192)


class Amplifier(nn.Module):
    """A ReLU whose outputs are multiplied."""

    factor = 4.0

    def forward(self, features: Tensor) -> Tensor:
        return self.factor * features.relu()


class StrongAmplifier(Amplifier):
    factor = 30.0


def activations_that_amplify(run: Path) -> forewarn.Monitor:
    return Breakable(run, MLP([16, *[64] * 8, 5], activation=Amplifier), lr=1e-4).train(60)


def deep_sigmoids(run: Path) -> forewarn.Monitor:
    return Breakable(run, MLP([16, *[32] * 14, 5], activation=nn.Sigmoid)).train()


def one_step_with_a_huge_gradient(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_loss = lambda step, loss: loss * 30 if WHEN <= step < WHEN + 5 else loss
    return it.train()


class _DetachedMLP(MLP):
    def forward(self, features: Tensor) -> Tensor:
        layers = next(iter(self.children()))
        return layers[2:](layers[:2](features).detach())


def detached_layer(run: Path) -> forewarn.Monitor:
    return Breakable(run, _DetachedMLP([16, 64, 64, 64, 5])).train(60)


def forgotten_zero_grad(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.zero_grad = False
    return it.train(60)


def frozen_on_the_way(run: Path) -> forewarn.Monitor:
    it = Breakable(run, weight_decay=0.0)

    def freeze(step: int) -> None:
        if step == 100:
            it.linears()[1].requires_grad_(False)

    it.before_step = freeze
    return it.train()


def lr_far_too_high(run: Path) -> forewarn.Monitor:
    return Breakable(run, lr=0.1).train(60)


def lr_far_too_low(run: Path) -> forewarn.Monitor:
    return Breakable(run, lr=2e-9, weight_decay=0.0).train(60)


def lr_jump(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def jump(step: int) -> None:
        it.optimizer.param_groups[0]["lr"] = 1e-3 if step < WHEN else 3e-2

    it.before_step = jump
    return it.train()


def optimizer_never_stepped(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.step_optimizer = False
    return it.train(60)


def layer_left_out_of_the_optimizer(run: Path) -> forewarn.Monitor:
    def without_the_first(model: nn.Module) -> list[nn.Parameter]:
        return list(model.parameters())[2:]

    return Breakable(run, parameters=without_the_first).train(60)


def nan_written_into_a_weight(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def poison(step: int) -> None:
        if step == WHEN:
            with torch.no_grad():
                it.linears()[2].weight[0, 0] = math.nan

    it.after_update = poison
    return it.train()


def weights_of_a_bad_checkpoint(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def load(step: int) -> None:
        if step == WHEN:
            with torch.no_grad():
                for linear in it.linears():
                    linear.weight.mul_(20.0)

    it.before_step = load
    return it.train()


class _Normalized(nn.Sequential):
    """Layers that are normalised after each step, so that the scale of a weight does not show in the loss."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(),
            nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5),
        )  # fmt: skip


def one_layer_of_another_scale(run: Path) -> forewarn.Monitor:
    it = Breakable(run, _Normalized())
    with torch.no_grad():
        it.linears()[1].weight.mul_(5000.0)
    return it.train()


def weights_that_fade(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def fade(step: int) -> None:
        with torch.no_grad():
            it.linears()[1].weight.mul_(0.8)

    it.after_update = fade
    return it.train(200)


def probe_that_raises(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def explode(measured: bool) -> None:
        raise RuntimeError("cannot read this")

    it.after_attach = lambda monitor: setattr(monitor._probes["weights"], "collect", explode)
    return it.train(60)


def forward_that_is_bypassed(run: Path) -> forewarn.Monitor:
    class Bypassed(MLP):
        def __call__(self, features: Tensor) -> Tensor:
            return self.forward(features)

    it = Breakable(run, Bypassed([16, 64, 64, 5]))
    it.clip = None
    return it.train(60)


def constant_though_a_cosine_was_planned(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.config = forewarn.Config(measure=forewarn.Measure(plan=forewarn.Plan(total=160)))
    return it.train()


def scheduler_forgotten_on_resume(run: Path) -> forewarn.Monitor:
    it = Breakable(run, lr=3e-4)
    it.train(60)
    it.optimizer.param_groups[0]["lr"] = 3e-3
    it.resume = True
    return it.train(60)


def epochs_counted_in_batches(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    scheduler = torch.optim.lr_scheduler.StepLR(it.optimizer, step_size=10)
    it.after_update = lambda step: scheduler.step()
    return it.train(140)


def warm_up_counted_in_examples(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.config = forewarn.Config(hyperparameters={"total_steps": 300})
    scheduler = torch.optim.lr_scheduler.LambdaLR(it.optimizer, lambda step: (step + 1) / 3200)
    it.after_update = lambda step: scheduler.step()
    return it.train()


def no_decay_at_all(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.config = forewarn.Config(hyperparameters={"total_steps": 100})
    return it.train(100)


class TwoHeads(nn.Module):
    """A trunk that two classifiers share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = MLP([16, 64, 64])
        self.heads = nn.ModuleDict({name: nn.Linear(64, 5) for name in ("first", "second")})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        shared = functional.relu(self.trunk(features))
        return {name: head(shared) for name, head in self.heads.items()}


def two_tasks(
    run: Path,
    model: nn.Module,
    losses: Callable[[Any, Tensor, Tensor], dict[str, Tensor]],
    weights: dict[str, float] | None = None,
    steps: int = 200,
) -> forewarn.Monitor:
    """Two tasks of one model, compared every 5 steps."""
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batches = shuffled(*classification(2000, 16, 5, seed=0), 0)
    with forewarn.watch(model, optimizer, run, every=5) as monitor:
        for _ in range(steps):
            inputs, targets = next(batches)
            loss = monitor.combine_losses(losses(model(inputs), inputs, targets), weights=weights, every=5)
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
    return monitor


def one_task_weighs_four_times_the_other(run: Path) -> forewarn.Monitor:
    torch.manual_seed(0)

    def losses(outputs: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {name: functional.cross_entropy(each, targets) for name, each in outputs.items()}

    return two_tasks(run, TwoHeads(), losses, {"first": 4.0}, steps=120)


def one_task_weighs_a_thousandth(run: Path) -> forewarn.Monitor:
    return dual_task_lstm(0, run, epochs=6, task_weights={"type": 0.001}).monitor


def two_tasks_that_want_the_opposite(run: Path) -> forewarn.Monitor:
    torch.manual_seed(0)

    def losses(output: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        wanted = inputs[:, :1]
        return {"up": (output - wanted).square().mean(), "down": (output + wanted).square().mean()}

    return two_tasks(run, MLP([16, 64, 1]), losses)


def dual_task_lstm(seed: int, run: Path, **settings: Any) -> DualTaskLSTM:
    """The run of `forewarn train multitask`, silent; its readings are in `run`."""
    torch.manual_seed(seed)
    data = bursts(2000, 24, seed)
    view = TaskView(20, console=Console(file=io.StringIO()))
    model = DualTaskLSTM()
    given = {"seed": seed, "monitor_gradients": True, "view": view, **settings}
    return model.fit(data.sequences, data.types, data.starts, data.ends, result_dir=run.parent, **given)


def bias_far_below_zero(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    with torch.no_grad():
        it.linears()[1].bias.fill_(-10.0)
    return it.train(60)


def features_that_nobody_scaled(run: Path) -> forewarn.Monitor:
    it = Breakable(run, MLP([16, 64, 64, 5], activation=nn.Tanh))
    it.change_batch = lambda step, inputs: (19 * inputs).clamp(-19, 19)
    with torch.no_grad():
        it.linears()[0].weight.mul_(30)
    return it.train(60)


def activations_that_explode(run: Path) -> forewarn.Monitor:
    return Breakable(run, MLP([16, *[64] * 6, 5], activation=StrongAmplifier)).train(60)


def one_sample_repeated_in_every_batch(run: Path) -> forewarn.Monitor:
    it = Breakable(run)
    it.change_batch = lambda step, inputs: inputs[:1].expand_as(inputs)
    return it.train(60)


def evaluation_mode_left_on(run: Path) -> forewarn.Monitor:
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    it = Breakable(run, model)

    def evaluate(step: int) -> None:
        if step == WHEN - 20:
            it.model.eval()

    it.before_step = evaluate
    return it.train()


class _Gain(nn.Module):
    """Multiplies the queries of an attention, as a temperature does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.factor = 1.0

    def forward(self, query: Tensor) -> Tensor:
        return self.factor * self.norm(query)


def gpt_with_gain(run: Path, **shape: Any) -> tuple[Breakable, list[_Gain]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{"context": 32, "depth": 2, "heads": 2, "width": 48, **shape}))
    gains = []
    for block in model.blocks:
        block.attention.query_norm = _Gain(block.attention.query_norm)
        gains.append(block.attention.query_norm)
    it = Breakable(run, model)
    it.batches = iter(TokenBatches(stdlib_text(400_000), batch_size=8, context=32, seed=0))
    return it, gains


def temperature_far_too_low(run: Path) -> forewarn.Monitor:
    it, gains = gpt_with_gain(run, heads=6, qk_norm=True)  # normalised: logits end at 33 · √8, and do not grow
    for gain in gains:
        gain.factor = 33.0
    return it.train(60)


def query_gain_that_grows(run: Path) -> forewarn.Monitor:
    it, gains = gpt_with_gain(run)

    def grow(step: int) -> None:
        gains[1].factor = 1.1 ** max(0, step - 20)

    it.before_step = grow
    return it.train(120)


def output_bias_that_drifts(run: Path) -> forewarn.Monitor:
    it = Breakable(run)

    def drift(step: int) -> None:
        with torch.no_grad():
            it.linears()[-1].bias.add_(1.0)

    it.before_step = drift
    return it.train(100)


class Mixture(nn.Module):
    """A classifier of four experts, of which each sample goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(MLP([16, 32, 32]) for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, features: Tensor) -> Tensor:
        weights = self.router(features).softmax(-1)
        best, chosen = weights.max(-1, keepdim=True)
        every = torch.stack([expert(features) for expert in self.experts], dim=1)
        logits: Tensor = self.head(best * every.gather(1, chosen.unsqueeze(-1).expand(-1, 1, 32)).squeeze(1))
        return logits


def router_that_avoids_an_expert(run: Path) -> forewarn.Monitor:
    torch.manual_seed(0)
    it = Breakable(run, Mixture())
    it.config = forewarn.Config(measure=forewarn.Measure(router="router$"))
    with torch.no_grad():
        it.model.router.bias[2] = -10.0
    return it.train(60)


FAULTS: dict[str, Callable[[Path], forewarn.Monitor]] = {
    "L101": nan_in_a_batch,
    "L102": one_absurd_batch,
    "L103": weights_that_wander_off,
    "G101": nan_in_the_backward_pass,
    "G102": loss_summed_over_everything,
    "G103": loss_scaled_to_nothing,
    "G104": one_step_with_a_huge_gradient,
    "G105": deep_sigmoids,
    "G106": branches_of_unequal_scale,
    "G107": loss_averaged_twice_on_the_way,
    "G108": detached_layer,
    "G109": forgotten_zero_grad,
    "G110": blocks_that_amplify_more_and_more,
    "G111": activations_that_amplify,
    "U101": frozen_on_the_way,
    "U102": lr_far_too_high,
    "U103": lr_far_too_low,
    "U104": lr_jump,
    "U105": optimizer_never_stepped,
    "U106": layer_left_out_of_the_optimizer,
    "U107": constant_though_a_cosine_was_planned,
    "U108": scheduler_forgotten_on_resume,
    "U109": epochs_counted_in_batches,
    "U110": warm_up_counted_in_examples,
    "U111": no_decay_at_all,
    "W101": nan_written_into_a_weight,
    "W102": weights_of_a_bad_checkpoint,
    "W103": one_layer_of_another_scale,
    "W104": weights_that_fade,
    "T101": one_task_weighs_four_times_the_other,
    "T102": one_task_weighs_a_thousandth,
    "T103": two_tasks_that_want_the_opposite,
    "A101": bias_far_below_zero,
    "A102": features_that_nobody_scaled,
    "A103": activations_that_explode,
    "A104": one_sample_repeated_in_every_batch,
    "A105": evaluation_mode_left_on,
    "A106": temperature_far_too_low,
    "A107": query_gain_that_grows,
    "A108": output_bias_that_drifts,
    "A109": router_that_avoids_an_expert,
    "X101": probe_that_raises,
    "X103": forward_that_is_bypassed,
}
"""By the code of the rule that must name it first; X102 and X104 are no faults of a run, and tested elsewhere."""


def sparse_units(run: Path) -> forewarn.Monitor:
    """Biases below zero: half to four fifths of the values are zero, and nearly every unit fires on something."""
    it = Breakable(run, MLP([16, 256, 256, 5]))
    with torch.no_grad():
        for linear in it.linears()[:-1]:
            linear.bias.fill_(-0.3)
    return it.train(200)


def bounded_units(run: Path) -> forewarn.Monitor:
    return Breakable(run, MLP([16, 64, 64, 5], activation=nn.Tanh)).train(200)


def head_that_starts_at_zero(run: Path) -> forewarn.Monitor:
    """Logits that grow from nothing."""
    it = Breakable(run)
    with torch.no_grad():
        it.linears()[-1].weight.zero_()
        it.linears()[-1].bias.zero_()
    return it.train(200)


def much_dropout(run: Path) -> forewarn.Monitor:
    layers = [nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.5)]
    return Breakable(run, nn.Sequential(*layers, nn.Linear(128, 5))).train(200)


def two_classes_learned_well(run: Path) -> forewarn.Monitor:
    """All that tells two classes apart lies on one line in the end."""
    it = Breakable(run, MLP([16, 64, 64, 2]), lr=5e-3)
    batches = it.batches
    it.batches = ((inputs, (targets > 2).long()) for inputs, targets in batches)
    return it.train(400)


def batch_norm_frozen_on_purpose(run: Path) -> forewarn.Monitor:
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    model[1].requires_grad_(False).eval()
    return Breakable(run, model).train(200)


TWINS: dict[str, Callable[[Path], forewarn.Monitor]] = {
    each.__name__: each
    for each in (
        sparse_units, bounded_units, head_that_starts_at_zero, much_dropout, two_classes_learned_well,
        batch_norm_frozen_on_purpose,
    )
}  # fmt: skip
"""Healthy runs that look like a fault of their layers at first sight."""
