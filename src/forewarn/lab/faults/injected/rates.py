"""Faults of the learning rate, its schedule and the optimizer's settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.session import Schedule, Session
from forewarn.lab.faults.workload import Trait


class Scaled(Change):
    """Multiplies one setting of the script."""

    def __init__(self, name: str, factor: float) -> None:
        self.name, self.factor = name, factor

    def number(self, name: str, value: float) -> float:
        return value * self.factor if name == self.name else value


class Set(Change):
    """Sets one setting of the script."""

    def __init__(self, name: str, to: float) -> None:
        self.name, self.to = name, to

    def number(self, name: str, value: float) -> float:
        return self.to if name == self.name else value


class GroupSetting(Change):
    """Sets an option of every optimizer group, where the optimizer has it."""

    def __init__(self, name: str, to: Any) -> None:
        self.name, self.to = name, to

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        for group in optimizer.param_groups:
            if self.name in group:
                group[self.name] = self.to


class LrStep(Change):
    """Multiplies the learning rate from a step on."""

    def __init__(self, onset: int, factor: float, *, resumes: bool = False) -> None:
        self.onset, self.factor, self.resumes = onset, factor, resumes

    def completed(self, step: int, session: Session) -> None:
        if step == self.onset - 1:
            session.scale_lr(self.factor)
            if self.resumes:
                session.resume()


class ForgottenState(Change):
    """Continues the run from a checkpoint without the optimizer's state."""

    def __init__(self, onset: int) -> None:
        self.onset = onset

    def completed(self, step: int, session: Session) -> None:
        if step == self.onset - 1:
            for optimizer in session.optimizers:
                optimizer.state.clear()
            session.resume()


class SteppedOften(Change):
    """Steps a scheduler several times where once is meant."""

    def __init__(self, times: int) -> None:
        self.times = times

    def schedule(self, schedule: Schedule) -> None:
        once = schedule.step

        def often(*given: Any) -> None:
            for _ in range(self.times):
                once(*given)

        schedule.step = often


class Clipped(Change):
    """Clips gradients before every optimizer step."""

    def __init__(self, max_norm: float, onset: int = 0) -> None:
        self.max_norm, self.onset = max_norm, onset
        self._session: Session | None = None

    def optimizer(self, optimizer: Optimizer, model: nn.Module, session: Session) -> None:
        def clip(optimizer: Optimizer, *_: Any) -> None:
            if session.step >= self.onset:
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)

        optimizer.register_step_pre_hook(clip)


@fault("lr-too-high", causes="U102", words="learning rate", fixes="lower_lr warm_up")
def lr_too_high(draw: Draw) -> Change:
    """The learning rate is 20 to 100 times too high from the start."""
    return Scaled("lr", draw.magnitude(20, 100))


@fault("lr-too-low", causes="U103", words="learning rate", fixes="raise_lr")
def lr_too_low(draw: Draw) -> Change:
    """The learning rate is 300 to 10,000 times too low."""
    return Scaled("lr", 1 / draw.magnitude(300, 10_000))


@fault("lr-jump", causes="U104 U102", words="learning rate", fixes="lower_lr", is_dynamic=True)
def lr_jump(draw: Draw) -> Change:
    """The learning rate jumps to 20 to 100 times its value during the run."""
    return LrStep(draw.onset(), draw.magnitude(20, 100))


@fault("no-warm-up", causes="U102 U104", words="warm.?up", fixes="warm_up lower_lr", needs={Trait.WARM_UP})
def no_warm_up(draw: Draw) -> Change:
    """The learning rate starts at its peak."""
    return Set("warm_up", 0)


@fault(
    "scheduler-too-often", causes="U109 E108 U107", words="schedul|learning rate close to zero", needs={Trait.SCHEDULE},
    fixes="step_scheduler_per_epoch lengthen_schedule check_stepping check_scheduler plan_steps raise_lr",
)  # fmt: skip
def scheduler_too_often(draw: Draw) -> Change:
    """A scheduler made for epochs is stepped many times as often."""
    return SteppedOften(round(draw.between(12, 30)))


@fault("plateau", causes="U109", words="learning rate",
       fixes="raise_lr lengthen_schedule step_scheduler_per_epoch check_schedule", is_dynamic=True)  # fmt: skip
def plateau(draw: Draw) -> Change:
    """The learning rate drops to less than a thousandth too early, and the loss stays where it is."""
    return LrStep(round(draw.num_steps * draw.between(0.05, 0.15)), 1 / draw.magnitude(1e3, 1e5))


@fault("lr-jump-on-resume", causes="U108", words="resume", fixes="restore_scheduler lower_lr", is_dynamic=True)
def lr_jump_on_resume(draw: Draw) -> Change:
    """The learning rate is 10 to 50 times higher after a resume."""
    return LrStep(draw.onset(), draw.magnitude(10, 50), resumes=True)


@fault("optimizer-state-lost", words="optimizer.{0,20}state|state.{0,20}optimizer", fixes="restore_optimizer warm_up",
       unlike={Trait.STATELESS}, is_dynamic=True)  # fmt: skip
def optimizer_state_lost(draw: Draw) -> Change:
    """The optimizer's state is not restored on resume."""
    return ForgottenState(draw.onset())


@fault(
    "weight-decay-too-high", words="weight.decay", fixes="lower_weight_decay",
    needs={Trait.WEIGHT_DECAY},
)  # fmt: skip
def weight_decay_too_high(draw: Draw) -> Change:
    """The weight decay is between 1 and 20."""
    return GroupSetting("weight_decay", draw.magnitude(1, 20))


@fault("epsilon-too-large", words="epsilon", fixes="lower_epsilon", needs={Trait.ADAM})
def epsilon_too_large(draw: Draw) -> Change:
    """The optimizer's epsilon is far above the size of the gradients, so that steps are tiny."""
    return GroupSetting("eps", draw.magnitude(1, 1e3))


@fault("epsilon-lost-in-half", words="epsilon", fixes="raise_epsilon keep_in_float32", needs={Trait.ADAM})
def epsilon_lost_in_half(draw: Draw) -> Change:
    """The optimizer's epsilon rounds to zero, as 1e-8 does in half precision."""
    return GroupSetting("eps", 0.0)


@fault("clip-too-tight", words="clip.*(tight|low|small|cut)", fixes="raise_clip lift_clip")
def clip_too_tight(draw: Draw) -> Change:
    """Gradients are clipped to a norm of 1e-5 to 1e-3."""
    return Clipped(draw.magnitude(1e-5, 1e-3))


@fault("discriminator-too-strong", words="discriminator|player|critic", causes="U102", fixes="lower_lr balance_players",
       needs={Trait.PLAYERS})  # fmt: skip
def discriminator_too_strong(draw: Draw) -> Change:
    """The discriminator's learning rate is 20 to 100 times too high."""
    return Scaled("discriminator_lr", draw.magnitude(20, 100))


@fault("discriminator-too-weak", words="discriminator|player|critic", causes="U103", fixes="raise_lr balance_players",
       needs={Trait.PLAYERS})  # fmt: skip
def discriminator_too_weak(draw: Draw) -> Change:
    """The discriminator hardly learns, so the generator's loss says nothing."""
    return Scaled("discriminator_lr", 1 / draw.magnitude(300, 3e3))
