"""REINFORCE, the simplest policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from forewarn.lab.faults.cart_pole import CartPoles
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait, workload

GAMMA, LONGEST = 0.99, 50


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 64)
        self.dropout = nn.Dropout(0.1)
        self.affine2 = nn.Linear(64, 2)

    def forward(self, state: Tensor) -> Tensor:
        scores: Tensor = self.affine2(torch.relu(self.dropout(self.affine1(state))))
        return scores


@workload("reinforce", num_steps=120, traits={Trait.REINFORCEMENT, Trait.POLICY, Trait.ADAM, Trait.FLOATS})
def reinforce(session: Session) -> float:
    """A policy gradient balances a pole; Adam, standardized returns of eight episodes, the loss summed over steps."""
    policy = Policy()
    session.built(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=session.number("lr", 1e-2))
    session.optimizer(optimizer)
    monitor = session.watch(policy, optimizer)
    carts = CartPoles(8, LONGEST, session.seed)
    bonus = session.number("entropy_weight", 0.0)
    recent: list[float] = []
    for _ in range(session.num_steps):
        state, alive = carts.reset(), torch.ones(8)
        log_probs, entropies, masks = [], [], []
        for _ in range(LONGEST):
            seen, _ = session.batch(session.pipeline(state), state)
            choice = Categorical(logits=policy(seen))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            entropies.append(choice.entropy())
            masks.append(alive)
            state, _, over = carts.push(action)
            alive = alive * (~over)
            if not alive.any():
                break
        rewards = torch.stack(masks)
        returns: list[Tensor] = []
        running = torch.zeros(8)
        for reward in reversed(rewards.unbind()):
            running = reward + GAMMA * running
            returns.insert(0, running)
        gains = torch.stack(returns)
        kept = rewards.bool()
        gains = (gains - gains[kept].mean()) / (gains[kept].std() + 1e-6)
        loss = -(torch.stack(log_probs) * gains * rewards).sum() / 8 - bonus * torch.stack(entropies).mean()
        loss = session.loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent.append(rewards.sum(0).mean().item())
        session.report(-recent[-1])
        monitor.step(loss)
    return -sum(recent[-20:]) / 20
