"""The three sets: which workload and which seeds belong to which. No workload and no kind is in two."""

from __future__ import annotations

from enum import StrEnum

from forewarn.lab.faults.workload import Workload
from forewarn.lab.faults.workloads import (
    adapters,
    adversarial,
    autoencoder,
    contrastive,
    convolution,
    diffusion,
    docking,
    experts,
    forecasting,
    graph,
    language_model,
    masked_encoder,
    perceptron,
    policy_gradient,
    proximal_policy,
    q_learning,
    recurrent,
    residual,
    segmentation,
    two_tasks,
    upscaling,
    vision_transformer,
    wasserstein,
)


class Set(StrEnum):
    """What a set is for."""

    DEVELOPMENT = "development"
    """Rules are tuned here."""
    VALIDATION = "validation"
    """Looked at once per change."""
    TEST = "test"
    """Run for the published table only."""


WORKLOADS: dict[Set, tuple[Workload, ...]] = {
    Set.DEVELOPMENT: (
        perceptron.mlp, convolution.cnn, language_model.gpt, autoencoder.vae_sum, autoencoder.vae_mean,
        adversarial.gan, policy_gradient.reinforce, graph.gcn, two_tasks.two_task,
        docking.actor_critic,
    ),
    Set.VALIDATION: (
        residual.resnet, recurrent.lstm, diffusion.diffusion, q_learning.dqn, contrastive.siamese,
        upscaling.super_resolution,
    ),
    Set.TEST: (
        vision_transformer.vit, masked_encoder.masked_encoder, wasserstein.wgan_gp, proximal_policy.ppo, experts.moe,
        adapters.lora, segmentation.segmentation, forecasting.forecasting,
    ),
}  # fmt: skip

FIRST_SEED = {Set.DEVELOPMENT: 1000, Set.VALIDATION: 2000, Set.TEST: 3000}


def seeds(which: Set, num: int) -> range:
    """The first seeds of a set."""
    return range(FIRST_SEED[which], FIRST_SEED[which] + num)


def set_of(workload: str) -> Set:
    """The set that a workload belongs to; raises KeyError if there is none."""
    for which, workloads in WORKLOADS.items():
        if workload in {candidate.name for candidate in workloads}:
            return which
    raise KeyError(workload)


def find_workload(name: str) -> Workload:
    return next(workload for workload in WORKLOADS[set_of(name)] if workload.name == name)
