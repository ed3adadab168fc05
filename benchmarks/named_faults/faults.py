"""Sixteen faults, each a small real training run that differs from its healthy twin in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.named_faults.tools import Tool
from forewarn.lab.data import classification, images
from forewarn.lab.networks import CNN, MLP

Batches = Iterator[tuple[Tensor, Tensor]]
Losses = Callable[[Any, Tensor], dict[str, Tensor]]

STEPS = 600
WHEN = 181
"""The step of a fault that comes midway: one that forewarn's default schedule does not measure in detail."""
EPOCH = 25
"""Steps between two validations."""
DEEP = [16, *[64] * 10, 5]
"""Deep enough for gradients to vanish for the whole run."""


def classify(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": functional.cross_entropy(logits, targets)}


@dataclass
class Loop:
    """A training loop with places for a fault."""

    model: nn.Module
    batches: Batches
    optimizer: torch.optim.Optimizer
    losses: Losses = classify
    weights: dict[str, float] = field(default_factory=dict)
    validation: tuple[Tensor, Tensor] | None = None
    steps: int = STEPS
    zero_grad: bool = True
    step_optimizer: bool = True
    returns_to_training: bool = True
    before_step: Callable[[int], None] = lambda step: None
    change_batch: Callable[[int, Tensor], Tensor] = lambda step, inputs: inputs

    def train(self, tool: Tool) -> list[float]:
        """Train under a tool; the losses of all steps."""
        recorded: list[float] = []
        for step in range(self.steps):
            self.before_step(step)
            inputs, targets = next(self.batches)
            losses = self.losses(self.model(self.change_batch(step, inputs)), targets)
            loss = tool.combine(losses, self.weights)
            loss.backward()
            tool.after_backward(loss)
            if self.step_optimizer:
                self.optimizer.step()
            if self.zero_grad:
                self.optimizer.zero_grad()
            tool.after_step(loss)
            recorded.append(loss.item())
            if self.validation is not None and (step + 1) % EPOCH == 0:
                tool.after_epoch(sum(recorded[-EPOCH:]) / EPOCH, self._validate(self.validation))
        return recorded

    def _validate(self, held_out: tuple[Tensor, Tensor]) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = sum(self.losses(self.model(held_out[0]), held_out[1]).values())
        if self.returns_to_training:
            self.model.train()
        return float(loss)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, how to recognize its cause in a text, and the run with and without it."""

    title: str
    pattern: str
    """Regular expression; the same one is applied to the words of every tool."""
    build: Callable[[], Loop]
    twin: Callable[[], Loop]


def shuffled(inputs: Tensor, targets: Tensor, size: int = 32) -> Batches:
    generator = torch.Generator().manual_seed(0)
    while True:
        which = torch.randint(len(inputs), (size,), generator=generator)
        yield inputs[which], targets[which]


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def features() -> tuple[Tensor, Tensor]:
    return classification(2000, 16, 5, seed=0)


def loop_of(model: nn.Module, lr: float = 1e-3) -> Loop:
    return Loop(model, shuffled(*features()), adamw(model, lr))


def mlp() -> Loop:
    """The healthy twin of most faults."""
    return loop_of(MLP([16, 64, 64, 64, 5]))


def forgotten_zero_grad() -> Loop:
    loop = mlp()
    loop.zero_grad = False
    return loop


def optimizer_never_stepped() -> Loop:
    loop = mlp()
    loop.step_optimizer = False
    return loop


def layer_left_out() -> Loop:
    loop = mlp()
    kept = [parameter for name, parameter in loop.model.named_parameters() if not name.startswith("layers.2.")]
    loop.optimizer = torch.optim.AdamW(kept, lr=1e-3)
    return loop


class _Detached(MLP):
    def forward(self, features: Tensor) -> Tensor:
        hidden = self.layers[:4](features).detach()
        logits: Tensor = self.layers[4:](hidden)
        return logits


def detached_graph() -> Loop:
    return loop_of(_Detached([16, 64, 64, 64, 5]))


def learning_rate_jump() -> Loop:
    loop = mlp()

    def jump(step: int) -> None:
        if step == WHEN:
            loop.optimizer.param_groups[0]["lr"] *= 30

    loop.before_step = jump
    return loop


def learning_rate_too_small() -> Loop:
    return loop_of(MLP([16, 64, 64, 64, 5]), lr=1e-7)


def nan_in_a_batch() -> Loop:
    loop = mlp()

    def poison(step: int, inputs: Tensor) -> Tensor:
        if step == WHEN:
            inputs = inputs.clone()
            inputs[3, 5] = math.nan
        return inputs

    loop.change_batch = poison
    return loop


def deep_mlp(factor: float = 1.0) -> Loop:
    model = MLP(DEEP)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                module.weight.mul_(factor)
    return loop_of(model)


def weights_ten_times_too_large() -> Loop:
    return deep_mlp(10.0)


def deep_sigmoids() -> Loop:
    return loop_of(MLP(DEEP, activation=nn.Sigmoid))


def dead_relus() -> Loop:
    loop = mlp()

    def kill(step: int) -> None:
        if step == WHEN:
            with torch.no_grad():
                loop.model.get_parameter("layers.2.bias").fill_(-10.0)

    loop.before_step = kill
    return loop


def validated(num_samples: int) -> Loop:
    inputs, targets = classification(num_samples + 1000, 16, 5, seed=0)
    model = MLP([16, 64, 64, 64, 5])
    loop = Loop(model, shuffled(inputs[1000:], targets[1000:]), adamw(model))
    loop.validation = inputs[:1000], targets[:1000]
    return loop


def enough_data() -> Loop:
    return validated(4000)


def overfitting() -> Loop:
    return validated(64)


class TwoHeads(nn.Module):
    """A trunk that two tasks share."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = MLP([16, 64, 64])
        self.heads = nn.ModuleDict({name: nn.Linear(64, 5) for name in ("kind", "place")})

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        shared = functional.relu(self.trunk(features))
        return {name: head(shared) for name, head in self.heads.items()}


def both_tasks(outputs: dict[str, Tensor], targets: Tensor) -> dict[str, Tensor]:
    wanted = {"kind": targets, "place": (targets + 2) % 5}
    return {name: functional.cross_entropy(logits, wanted[name]) for name, logits in outputs.items()}


def two_tasks() -> Loop:
    loop = loop_of(TwoHeads())
    loop.losses = both_tasks
    return loop


def starved_task() -> Loop:
    loop = two_tasks()
    loop.weights = {"place": 0.001}
    return loop


def convolutions() -> Loop:
    inputs, targets = images(1000, 4, seed=0)
    model = CNN([1, 8, 16], 4)
    loop = Loop(model, shuffled(inputs[200:], targets[200:]), adamw(model))
    loop.validation = inputs[:200], targets[:200]
    return loop


def evaluation_mode_left_on() -> Loop:
    loop = convolutions()
    loop.returns_to_training = False
    return loop


class Encoder(nn.Module):
    """Two of torch's own transformer layers over the features as tokens, and the mean of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(2, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(features.unflatten(-1, (8, 2)))).mean(1))
        return logits


def transformer() -> Loop:
    return loop_of(Encoder())


def attention_too_sharp() -> Loop:
    loop = transformer()
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            if name.endswith("in_proj_weight"):
                parameter[:64].mul_(10.0)  # queries and keys
    return loop


class _SoftmaxTwice(MLP):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features).softmax(-1)


def softmax_twice() -> Loop:
    return loop_of(_SoftmaxTwice([16, 64, 64, 64, 5]))


def labels_of_other_samples() -> Loop:
    loop = mlp()
    inputs, targets = features()
    loop.batches = shuffled(inputs, targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))])
    return loop


FAULTS: dict[str, Fault] = {
    "zero-grad": Fault(
        "`zero_grad()` forgotten",
        r"zero_grad|gradients? .{0,40}accumulat|accumulat.{0,40}gradient|not (zeroed|cleared|reset)",
        forgotten_zero_grad, mlp,
    ),
    "never-stepped": Fault(
        "`optimizer.step()` never called",
        r"optimizer\.step|optimizer.{0,30}(never|not|no).{0,20}step|(never|not|no).{0,20}optimizer.{0,10}step",
        optimizer_never_stepped, mlp,
    ),
    "left-out": Fault(
        "a layer's parameters not given to the optimizer",
        r"(not|no|missing|absent|outside|left out).{0,40}optimi[sz]er|optimi[sz]er.{0,40}(not|missing|lacks|without)",
        layer_left_out, mlp,
    ),
    "detached": Fault(
        "graph cut by `.detach()`",
        r"detach|no gradient|without (a )?gradient|gradients?.{0,20}(is|are) (none|missing|zero)"
        r"|(none|missing|zero).{0,20}gradient|graph.{0,20}(cut|broken|disconnect)|disconnect",
        detached_graph, mlp,
    ),
    "rate-jump": Fault(
        "learning rate × 30 midway",
        r"(learning rate|\blr\b).{0,40}(went|jump|rose|chang|increas|too (high|large)|× ?30|from)"
        r"|(reduce|lower|decrease).{0,20}(learning rate|\blr\b)",
        learning_rate_jump, mlp,
    ),
    "rate-small": Fault(
        "learning rate 10,000× too small",
        r"(learning rate|\blr\b).{0,40}(too (low|small)|small)|(small|low).{0,20}(learning rate|\blr\b)"
        r"|(increase|raise).{0,20}(learning rate|\blr\b)",
        learning_rate_too_small, mlp,
    ),
    "nan-batch": Fault(
        "a NaN in one batch of inputs",
        r"(nan|inf|finite)[^.·]{0,60}\b(inputs?|data)\b|\b(inputs?|data)\b[^.·]{0,60}(nan|inf\b|infinit|finite)",
        nan_in_a_batch, mlp,
    ),
    "large-init": Fault(
        "weights initialised 10× too large: exploding gradients",
        r"explod\w*[ _-]grad|grad\w*[ _-]explo|(initiali[sz]|weights?).{0,30}too (large|big)",
        weights_ten_times_too_large, deep_mlp,
    ),
    "vanishing": Fault(
        "deep sigmoid stack: vanishing gradients",
        r"vanish|fade|gradients?.{0,60}(weaker|shrink|smaller).{0,40}(layer|depth|input)",
        deep_sigmoids, deep_mlp,
    ),
    "dead-relus": Fault(
        "a layer of dead ReLUs",
        r"\bdead\b|dying|activation death|never (fire|active)|inactive|always zero|zero for every",
        dead_relus, mlp,
    ),
    "overfitting": Fault(
        "overfitting: validation loss rises",
        r"overfit|(validation|held.out).{0,40}(ris|rose|wors|increas|above)|generali[sz]ation gap",
        overfitting, enough_data,
    ),
    "starved-task": Fault(
        "one task starves another",
        r"\btasks?\b",
        starved_task, two_tasks,
    ),
    "eval-mode": Fault(
        "`model.train()` forgotten after validation: BatchNorm in eval mode",
        r"eval(uation)?[ -]?mode|\.eval\(|model\.train|running statistics",
        evaluation_mode_left_on, convolutions,
    ),
    "attention": Fault(
        "query and key weights 10× too large: attention collapses to one token",
        r"attention",
        attention_too_sharp, transformer,
    ),
    "softmax-twice": Fault(
        "softmax before `cross_entropy`, which applies it too",
        r"softmax|probabilit",
        softmax_twice, mlp,
    ),
    "wrong-labels": Fault(
        "labels shuffled against their inputs",
        r"label|targets?\b.{0,40}(shuffl|match|align)|shuffl",
        labels_of_other_samples, mlp,
    ),
}  # fmt: skip
