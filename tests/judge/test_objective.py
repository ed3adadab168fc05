"""Whether a loss is what the run minimizes, by its sign alone."""

import numpy as np
import pytest

from forewarn.judge.objective import is_objective
from forewarn.judge.series import Series
from forewarn.types import RunInfo


def decides(losses, objective="auto"):
    return is_objective(Series.of(losses), Series.of([]), RunInfo(objective=objective))


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_log_likelihood_that_passes_through_zero_and_back_is_the_objective(seed):
    noise = 0.2 * np.random.default_rng(seed).normal(size=400)
    falls_and_rises = np.concatenate([np.linspace(1.4, -0.8, 200), np.linspace(-0.8, 0.1, 200)])
    losses = falls_and_rises + noise
    assert np.count_nonzero(np.diff(np.sign(losses[-64:]))) >= 6
    assert decides(losses)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("early", [0, 200])
def test_a_policy_loss_that_keeps_changing_its_sign_is_not(seed, early):
    random = np.random.default_rng(seed)
    losses = np.concatenate([2.0 + 0.1 * random.normal(size=early), random.normal(size=300)])
    assert not decides(losses)
    assert decides(losses, objective="loss")
