"""A policy that acts between its steps shows that the loss is not what the run improves."""

import pytest
import torch
from torch import nn

import forewarn


@pytest.mark.parametrize(("num_passes", "codes"), [(0, []), (1, []), (3, [2.0])])
def test_several_passes_without_gradients_are_those_of_a_policy(num_passes, codes, tmp_path):
    torch.manual_seed(0)
    policy = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with forewarn.watch(policy, optimizer, tmp_path / "run", every=1, views=[]) as monitor:
        for _ in range(3):
            with torch.no_grad():
                for _ in range(num_passes):
                    policy(torch.randn(1, 4))
            optimizer.zero_grad()
            loss = policy(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
        policy.eval()
        with torch.no_grad():
            policy(torch.randn(1, 4))
    readings = monitor.history.panel("update/separate_losses")
    assert sorted(set(readings.values.ravel().tolist())) == codes
