"""Faults in the model: how it is initialized, and what its layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.injected.wiring import first_layers, layers
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait


class Rebuilt(Change):
    """Changes the model once, before the run or after a step of it."""

    def __init__(self, change: Callable[[nn.Module], None], onset: int = 0) -> None:
        self.change, self.onset = change, onset

    def model(self, model: nn.Module) -> None:
        if self.onset == 0:
            self._apply(model)

    def completed(self, step: int, session: Session) -> None:
        if self.onset and step == self.onset - 1:
            self._apply(session.model)

    def _apply(self, model: nn.Module) -> None:
        with torch.no_grad():
            self.change(model)


class Drifting(Change):
    """Changes the model after every step from the onset on."""

    def __init__(self, change: Callable[[nn.Module], None], onset: int) -> None:
        self.change, self.onset = change, onset

    def completed(self, step: int, session: Session) -> None:
        if step >= self.onset:
            with torch.no_grad():
                self.change(session.model)


def query_and_key_weights(model: nn.Module) -> Iterator[Tensor]:
    """The rows of attention weights that make queries and keys."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            yield module.in_proj_weight[: 2 * module.embed_dim]
        elif isinstance(qkv := getattr(module, "qkv", None), nn.Linear):
            yield qkv.weight[: 2 * qkv.in_features]


def _scaled_queries_and_keys(factor: float) -> Callable[[nn.Module], None]:
    def scale(model: nn.Module) -> None:
        for rows in query_and_key_weights(model):
            rows.mul_(factor)

    return scale


class OutputChanged(Change):
    """Changes what the model returns."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def model(self, model: nn.Module) -> None:
        model.register_forward_hook(lambda _module, _inputs, output: self.change(output))


@fault("init-times-ten", words="initial", fixes="lower_initial_scale")
def init_times_ten(draw: Draw) -> Change:
    """All weights start 5 to 15 times as large."""
    factor = draw.magnitude(5, 15)

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(factor)

    return Rebuilt(scale)


@fault("vanishing-stack", causes="G105 G103", words="initial|vanish|fades", fixes="raise_initial_scale add_residuals "
       "add_residual_connections normalize_blocks change_activation replace_activation")  # fmt: skip
def vanishing_stack(draw: Draw) -> Change:
    """All weights start at a twentieth to a hundredth, so that signals and gradients fade with depth."""
    factor = 1 / draw.magnitude(20, 100)

    def scale(model: nn.Module) -> None:
        for _, module in layers(model):
            for parameter in module.parameters(recurse=False):
                parameter.mul_(factor)

    return Rebuilt(scale)


@fault("dead-relu", causes="A101", words="dead", fixes="lower_bias change_activation replace_activation "
       "reinitialize_units lower_lr", needs={Trait.RELU})  # fmt: skip
def dead_relu(draw: Draw) -> Change:
    """The biases before the ReLUs are so negative that the units never fire."""
    low = draw.between(15, 40)

    def kill(model: nn.Module) -> None:
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        for bias in biases[: max(1, len(biases) // 3)]:
            bias.fill_(-low)

    return Rebuilt(kill)


@fault("exploding-embedding-row", causes="W102 W103", words="embedding", fixes="inspect_layer clip_gradient",
       needs={Trait.TOKENS}, is_dynamic=True)  # fmt: skip
def exploding_embedding_row(draw: Draw) -> Change:
    """Rows of the embedding grow to 300 to 3,000 times their size."""
    factor = draw.magnitude(300, 3000)

    def grow(model: nn.Module) -> None:
        embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
        embedding.weight[:: max(1, embedding.num_embeddings // 4)].mul_(factor)

    return Rebuilt(grow, draw.onset())


@fault("attention-logit-growth", causes="A107", words="attention logit", needs={Trait.ATTENTION}, is_dynamic=True,
       fixes="clip_query_and_key_weights normalize_queries lower_lr check_attention_scale")  # fmt: skip
def attention_logit_growth(draw: Draw) -> Change:
    """Queries and keys grow by some percent with every step."""
    return Drifting(_scaled_queries_and_keys(1 + draw.between(0.03, 0.08)), draw.onset())


@fault("attention-entropy-collapse", causes="A106 A107", words="attention", needs={Trait.ATTENTION},
       fixes="check_attention_scale clip_query_and_key_weights normalize_queries")  # fmt: skip
def attention_entropy_collapse(draw: Draw) -> Change:
    """Attention logits are hundreds of times too large from the start, so that each query sees one key."""
    return Rebuilt(_scaled_queries_and_keys(draw.magnitude(20, 60)))


@fault("output-drift", causes="A108", words="logits drift|output.*drift", needs={Trait.CLASSES}, is_dynamic=True,
       fixes="add_z_loss drop_output_bias divide_logits")  # fmt: skip
def output_drift(draw: Draw) -> Change:
    """The output's logits drift away from zero together."""
    rate = draw.between(0.5, 2)
    onset = draw.onset()
    shift = torch.zeros(())

    class Shifted(Drifting):
        def model(self, model: nn.Module) -> None:
            model.register_forward_hook(lambda _module, _inputs, output: output + shift)

    return Shifted(lambda _model: _add(shift, rate), onset)


def _add(shift: Tensor, rate: float) -> None:
    shift.add_(rate)


@fault(
    "batchnorm-in-eval", causes="A105", words="batch.?norm.*evaluation", fixes="call_train", needs={Trait.BATCH_NORM}
)
def batchnorm_in_eval(draw: Draw) -> Change:
    """Batch normalization stays in evaluation mode and uses its initial statistics."""

    def stop(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                module.train = lambda mode=True, module=module: module  # type: ignore[method-assign,misc]

    return Rebuilt(stop)


@fault("double-softmax", words="softmax|sum to 1|already probabilities", fixes="remove_softmax", needs={Trait.CLASSES})
def double_softmax(draw: Draw) -> Change:
    """The model ends with a softmax, and the loss applies another."""
    return OutputChanged(lambda logits: torch.softmax(logits, -1))


@fault("saturated-tanh", causes="A102", words="saturat|initial weights are too large", needs={Trait.TANH},
       fixes="lower_initial_scale shrink_inputs replace_activation change_activation normalize_blocks")  # fmt: skip
def saturated_tanh(draw: Draw) -> Change:
    """The first layers' weights are so large that every tanh is at an end of its range."""
    factor = draw.magnitude(30, 100)

    def grow(model: nn.Module) -> None:
        for module in first_layers(model, 0.5):
            for parameter in module.parameters(recurse=False):
                parameter.mul_(factor)

    return Rebuilt(grow)


@fault("dead-expert", causes="A109", words="expert", needs={Trait.ROUTER},
       fixes="balance_loads add_router_noise")  # fmt: skip
def dead_expert(draw: Draw) -> Change:
    """The router starts with a bias against most experts, so that they get no tokens."""

    def starve(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith("router") and isinstance(module, nn.Linear):
                module.bias[1:].fill_(-draw.between(20, 40))
                module.bias.requires_grad_(False)

    return Rebuilt(starve)
