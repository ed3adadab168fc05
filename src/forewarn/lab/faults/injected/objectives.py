"""Faults in the objective of particular kinds of training."""

from __future__ import annotations

from forewarn.lab.faults.change import Change, Draw
from forewarn.lab.faults.fault import fault
from forewarn.lab.faults.injected.rates import Scaled, Set
from forewarn.lab.faults.workload import Trait


@fault("divergence-wrong-sign", words=r"\bsign\b|negative|below zero|unbounded", fixes="check_sign check_objective",
       needs={Trait.VARIATIONAL})  # fmt: skip
def divergence_wrong_sign(draw: Draw) -> Change:
    """The divergence of a variational autoencoder is subtracted instead of added."""
    return Scaled("divergence_weight", -1.0)


@fault("divergence-too-strong", causes="A104", words="collapse|posterior", fixes="lower_task_weight check_objective",
       needs={Trait.VARIATIONAL})  # fmt: skip
def divergence_too_strong(draw: Draw) -> Change:
    """The divergence weighs 100 times as much, and the latent code collapses."""
    return Scaled("divergence_weight", draw.magnitude(50, 500))


@fault("task-collapse", causes="T102 T101", words="task", fixes="lower_task_weight raise_task_weight balance_tasks",
       needs={Trait.TASKS})  # fmt: skip
def task_collapse(draw: Draw) -> Change:
    """One task's loss weighs 300 to 3,000 times as much as the other's."""
    return Scaled("task_weight", draw.magnitude(300, 3000))


@fault("policy-entropy-collapse", words="entropy|deterministic", fixes="raise_entropy", needs={Trait.POLICY})
def policy_entropy_collapse(draw: Draw) -> Change:
    """The entropy bonus has the wrong sign, and the policy stops exploring."""
    return Set("entropy_weight", -draw.between(1, 3))


@fault("target-network-never-updated", words="target network|never (change|move|update)|constant cop",
       fixes="update_target", needs={Trait.TARGET_NETWORK})  # fmt: skip
def target_network_never_updated(draw: Draw) -> Change:
    """The target network stays as it was initialized."""
    return Set("target_every", 1e9)
