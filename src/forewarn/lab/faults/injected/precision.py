"""Faults of half precision, emulated bit for bit where a CPU has no fast half."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.injected.wiring import layers
from forewarn.lab.faults.session import Session


class _Half(torch.autograd.Function):
    """Rounds a tensor and its gradient to half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.half().float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.half().float()


def _rounded(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    is_rounded = isinstance(output, Tensor) and output.is_floating_point()
    return _Half.apply(output) if is_rounded else output  # type: ignore[no-untyped-call]


class HalfPrecision(Change):
    """Every layer's output and its gradient in half precision, with a fixed loss scale and no check for overflow."""

    def __init__(self, scale: float, onset: int = 0) -> None:
        self.scale, self.onset = scale, onset

    def model(self, model: nn.Module) -> None:
        for _, module in layers(model):
            module.register_forward_hook(_rounded)

    def loss(self, step: int, loss: Tensor) -> Tensor:
        scaled: Tensor = _Scale.apply(loss, self.scale)  # type: ignore[no-untyped-call]
        return scaled

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        def unscale(optimizer: Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(self.scale)

        optimizer.register_step_pre_hook(unscale)


class _Scale(torch.autograd.Function):
    """The identity; its gradient is scaled, as if the loss had been scaled before `backward`."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.scale, None


@fault("half-overflow", causes="G101 G102", words="overflow|half|loss scale",
       fixes="use_bfloat16 check_loss_scale compute_in_float32 lower_loss_scale")  # fmt: skip
def half_overflow(draw: Draw) -> Change:
    """Gradients overflow in half precision because the loss scale is too large."""
    return HalfPrecision(2.0 ** round(draw.between(26, 34)))


@fault("half-underflow", causes="G103 U101:zero_gradient", words="underflow|half|loss scale",
       fixes="scale_loss use_bfloat16 compute_in_float32 check_loss_scale keep_in_float32")  # fmt: skip
def half_underflow(draw: Draw) -> Change:
    """Gradients round to zero in half precision because the loss scale is too small."""
    return HalfPrecision(2.0 ** -round(draw.between(16, 22)))
