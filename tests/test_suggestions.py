"""What is suggested for a name that does not exist."""

from __future__ import annotations

import pytest

from forewarn.metrics import all_metrics
from forewarn.suggestions import closest, did_you_mean

METRICS = {metric.name: metric.label for metric in all_metrics() if "*" not in metric.name}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("loss", "train/loss"),
        ("Loss", "train/loss"),
        ("train_loss", "train/loss"),
        ("trian/loss", "train/loss"),
        ("lr", "train/lr"),
        ("learning_rate", "train/lr"),
        ("learningRate", "train/lr"),
        ("grad_norm", "gradient/global_norm"),
        ("gradnorm", "gradient/global_norm"),
        ("gradient norm", "gradient/global_norm"),
        ("val_loss", "eval/loss"),
        ("validation_loss", "eval/loss"),
        ("eval_loss", "eval/loss"),
        ("val/loss", "eval/loss"),
        ("ema", "train/loss_ema"),
        ("accuracy", "eval/accuracy"),
        ("acc", "eval/accuracy"),
        ("memory", "system/process_memory_bytes"),
        ("tokens_per_sec", "speed/tokens_per_second"),
        ("update_ratio", "update/ratio"),
        ("weight_norm", "weight/norm"),
        ("dead", "activation/dead_fraction"),
        ("noise scale", "gradient/noise_scale"),
    ],
)
def test_a_short_or_misspelled_name_suggests_the_metric_that_is_meant_first(typed: str, meant: str) -> None:
    assert closest(typed, METRICS)[0] == meant


def test_the_order_of_the_candidates_decides_between_equals() -> None:
    assert closest("loss", ["b/loss", "a/loss"]) == ["b/loss", "a/loss"]


def test_only_what_is_close_is_suggested() -> None:
    for typed in ("", "   ", "/", "xyz", "qqqqqq", "\x1b[31m", "🦜", "x" * 100_000):
        assert closest(typed, METRICS) == []
        assert did_you_mean(typed, METRICS) == ""


def test_a_suggestion_is_quoted_so_that_control_characters_are_escaped() -> None:
    assert did_you_mean("evil", ["evil\x1b[31m"]) == r"did you mean 'evil\x1b[31m'?"
