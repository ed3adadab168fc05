"""REINFORCE on a small game, watched. The loss is not what the run improves, so the loop says what is.

python examples/reinforcement.py

A policy is at one end of a corridor and has to reach the other. `Config(objective="return")` keeps rules from judging
the course of the loss, which means nothing here; `monitor.log` records the return.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributions import Categorical

import forewarn

LENGTH, MOST_MOVES = 6, 30


def play(policy: nn.Module) -> tuple[torch.Tensor, float]:
    """One game: the log-probabilities of its moves, and its return."""
    place, log_probabilities = 0, []
    while place < LENGTH - 1 and len(log_probabilities) < MOST_MOVES:
        position = torch.zeros(LENGTH)
        position[place] = 1.0
        choice = Categorical(logits=policy(position))
        step = choice.sample()
        log_probabilities.append(choice.log_prob(step))
        place = min(max(place + 2 * int(step) - 1, 0), LENGTH - 1)
    return torch.stack(log_probabilities), 1.0 - len(log_probabilities) / MOST_MOVES


def main(run: str | Path = "runs/reinforcement", steps: int = 150) -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(LENGTH, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    usual = 0.0
    with forewarn.watch(policy, optimizer, run=run, config=forewarn.Config(objective="return")) as monitor:
        for _ in range(steps):
            games = [play(policy) for _ in range(8)]
            mean = sum(reward for _, reward in games) / len(games)
            usual = 0.9 * usual + 0.1 * mean
            loss = -torch.stack([moves.sum() * (reward - usual) for moves, reward in games]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log("game/return", mean)
            monitor.step(loss)
    print(f"mean return {mean:.2f}, at most {1 - (LENGTH - 1) / MOST_MOVES:.2f}")


if __name__ == "__main__":
    main()
