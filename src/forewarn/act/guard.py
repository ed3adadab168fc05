"""Skips the optimizer step of a batch whose gradient is far out of range, before it can do harm.

The limit comes from the run's own earlier norms. Norm, limit and decision stay on the device. A fused optimizer takes
the decision from there (`found_inf`); any other needs one read by the host, which costs nothing on a CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from forewarn.act.training_state import parameters_of
from forewarn.measure.parameters import ParameterIndex
from forewarn.measure.probe import ONE, Array, Pending, Probe, Reading
from forewarn.measure.probes.stepping import SteppingProbe
from forewarn.measure.step import Step
from forewarn.policy import SkipBatch

_log = logging.getLogger("forewarn")

_DEVIATION = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""


class Guard(Probe):
    """`guard/checked_norm`, `guard/norm_limit`, `guard/skipped` on every step, and what makes an optimizer skip one.

    Under DDP every rank has the same averaged gradients, so each computes the same norm, limit and decision without
    asking the others. Under FSDP2 the norm of `monitor.clip_grad_norm_`, which is that of all shards, is used.
    """

    name = "guard"
    on_every_rank = True

    def __init__(
        self, settings: SkipBatch, dry_run: bool, parameter_index: ParameterIndex, model: nn.Module,
        stepping: SteppingProbe,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._dry_run = dry_run
        self._parameter_index = parameter_index
        self._model = model
        self._stepping = stepping
        self._levels: dict[int, _Level] = {}
        """Per optimizer."""
        self._clip_norm: Tensor | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        """Parameters and their gradients, while a step is skipped."""
        self._lent: list[Optimizer] = []
        """Optimizers that got a `found_inf` of ours."""
        self._decided: list[tuple[Tensor, Tensor, Tensor]] = []
        self._used = 0
        """Number of skips in earlier processes, which count for the budget."""
        self.unavailable = ""
        """Why batches cannot be skipped in this run; empty if they can."""

    def clipped(self, norm: Tensor) -> None:
        """Keep the norm that clipping has computed for this step."""
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._clip_norm = whole.detach()

    def before(self, index: int, optimizer: Optimizer, closure: Any) -> None:
        """Decide whether the step is skipped, and prepare the optimizer for it."""
        self.after()  # a step that raised was never followed by this
        if self.unavailable:
            return
        if closure is not None or isinstance(optimizer, LBFGS):
            self._give_up(f"{type(optimizer).__name__} computes its gradients within the step")
            return
        norm = self._norm(optimizer)
        if norm is None:
            return
        is_fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if not is_fused and norm.device.type != "cpu" and not self._settings.host_read:
            self._give_up(
                f"{type(optimizer).__name__} is not fused, so each step would wait for the device; use fused=True, or "
                "allow it with SkipBatch(host_read=True)"
            )
            return
        level = self._levels.get(index)
        if level is None:
            level = self._levels[index] = _Level(self._settings, norm.device, self._settings.times - self._used)
        overflow = getattr(optimizer, "found_inf", None)
        skips, limit = level.judge(norm, overflow if isinstance(overflow, Tensor) else None)
        self._decided.append((skips.float(), norm, limit))
        if self._dry_run:
            return
        if is_fused:
            flag = skips.float()
            if isinstance(overflow, Tensor):
                optimizer.found_inf = torch.maximum(overflow, flag.to(overflow.device))  # type: ignore[attr-defined]
            else:
                self._lent.append(optimizer)
                optimizer.found_inf = flag  # type: ignore[attr-defined]
            self._stepping.skips(flag)
        elif bool(skips):
            self._stepping.skips(skips.float())
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None  # torch optimizers leave out a parameter without a gradient

    def after(self) -> None:
        """Return what was taken from the optimizer for its step."""
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        lent, self._lent = self._lent, []
        for optimizer in lent:
            optimizer.__dict__.pop("found_inf", None)

    def _norm(self, optimizer: Optimizer) -> Tensor | None:
        """The norm of the gradients before clipping, the same on all ranks; None if there is none."""
        shards = self._parameter_index.shards
        if self._clip_norm is not None and (shards is None or not shards.is_sharded or _is_fsdp2(self._model)):
            return self._clip_norm.reshape(())
        if shards is not None and shards.is_sharded:
            self._give_up("the gradients are sharded, and only `monitor.clip_grad_norm_` knows the norm of all shards")
            return None
        if self._parameter_index.rank is not None and not _is_ddp(self._model):
            self._give_up("the ranks may have different gradients; watch the DistributedDataParallel module itself")
            return None
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if not gradients:
            return None
        if any(gradient.is_sparse for gradient in gradients):
            gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        norms = torch._foreach_norm([gradient.detach() for gradient in gradients])
        norm: Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device, torch.float32) for one in norms]))
        scale = getattr(optimizer, "grad_scale", None)
        return norm.div(scale.to(norm.device)) if isinstance(scale, Tensor) else norm

    def _give_up(self, reason: str) -> None:
        self.unavailable = reason
        _log.warning("batches cannot be skipped: %s", reason)

    def collect(self, step: Step) -> Pending | None:
        self.after()
        decided, self._decided, self._clip_norm = self._decided, [], None
        if not decided:
            return None

        def decode(arrays: Sequence[Array]) -> Iterator[Reading]:
            values = [float(array) for array in arrays]
            worst = max(range(0, len(values), 3), key=lambda place: values[place])
            yield Reading("guard/skipped", ONE, values[worst])
            yield Reading("guard/checked_norm", ONE, values[worst + 1])
            if not math.isnan(values[worst + 2]):
                yield Reading("guard/norm_limit", ONE, values[worst + 2])

        return Pending([tensor.detach().clone() for three in decided for tensor in three], decode)

    @property
    def num_skipped(self) -> int:
        """Number of skips so far; the host waits for the device."""
        return self._used + sum(level.num_skipped for level in self._levels.values())

    def state_dict(self) -> dict[str, Any]:
        return {
            "used": self.num_skipped,
            "norms": {str(index): level.norms.tolist() for index, level in self._levels.items()},
            "streaks": {str(index): int(level.streak) for index, level in self._levels.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._used = max(self.num_skipped, int(state["used"]))  # a return to an earlier step does not renew the budget
        self._levels = {}
        device = next((parameter.device for parameter in self._parameter_index.parameters), torch.device("cpu"))
        for index, norms in state["norms"].items():
            level = _Level(self._settings, device, self._settings.times - self._used)
            level.norms = torch.as_tensor(norms, dtype=torch.float32).to(device)
            level.streak = torch.tensor(int(state["streaks"][index]), device=device)
            self._levels[int(index)] = level


class _Level:
    """The usual gradient norm of one optimizer, on the device of its gradients."""

    def __init__(self, settings: SkipBatch, device: torch.device, left: int) -> None:
        self._settings = settings
        self.norms = torch.full((settings.window,), math.nan, device=device)
        self._allowed = left
        self.left = torch.tensor(left, device=device)
        self.streak = torch.zeros((), dtype=torch.long, device=device)
        """Number of batches with a finite norm that were skipped in a row."""

    @property
    def num_skipped(self) -> int:
        return self._allowed - int(self.left)

    def judge(self, norm: Tensor, overflow: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Whether this batch is skipped, and the limit; NaN while too few norms are known.

        A step that a gradient scaler skips because of an `overflow` is its own affair.
        """
        settings = self._settings
        norm = norm.to(torch.float32)
        logs = self.norms.log()
        middle = logs.nanmedian()
        spread = (logs - middle).abs().nanmedian() * (_DEVIATION * settings.deviations)
        limit = (middle + spread.clamp(min=math.log(settings.factor))).exp()
        limit = torch.where(self.norms.isfinite().sum() >= settings.least, limit, math.nan)
        is_finite = norm.isfinite()
        is_far = is_finite & (norm > limit)
        has_moved = is_far & (self.streak >= settings.in_a_row)
        skips = (~is_finite | (is_far & ~has_moved)) & (self.left > 0)
        if overflow is not None:
            skips = skips & ~(overflow.reshape(()) > 0)
        self.left = self.left - skips.long()
        self.streak = torch.where(is_far & ~has_moved, self.streak + 1, torch.zeros_like(self.streak))
        kept = torch.where(has_moved, torch.full_like(self.norms, math.nan), self.norms)
        joined = torch.cat([kept[1:], norm.reshape(1)])
        usable = ~skips & is_finite & (norm > 0)
        self.norms = torch.where(usable, joined, kept)
        return skips, limit


def _is_ddp(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def _is_fsdp2(model: nn.Module) -> bool:
    """Whether norms are those of all shards: FSDP1 clips by a method of its own."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
