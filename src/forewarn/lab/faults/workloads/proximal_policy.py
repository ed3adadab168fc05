"""Proximal policy optimization."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from forewarn.lab.faults.cart_pole import CartPoles
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait, workload

NUM_CARTS, ROLLOUT, LONGEST, GAMMA, LAMBDA, CLIP, EPOCHS = 16, 32, 100, 0.98, 0.95, 0.2, 4


def linear(num_in: int, num_out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            linear(4, 64, 2**0.5), nn.Tanh(), linear(64, 64, 2**0.5), nn.Tanh(), linear(64, 2, 0.01)
        )
        self.critic = nn.Sequential(
            linear(4, 64, 2**0.5), nn.Tanh(), linear(64, 64, 2**0.5), nn.Tanh(), linear(64, 1, 1.0)
        )

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state).squeeze(-1)


@workload("ppo", num_steps=320, traits={Trait.REINFORCEMENT, Trait.POLICY, Trait.ADAM, Trait.FLOATS, Trait.TANH})
def ppo(session: Session) -> float:
    """An actor and a critic balance a pole; Adam with epsilon 1e-5, four epochs per rollout, clipping at 0.5."""
    agent = Agent()
    session.built(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=session.number("lr", 2.5e-3), eps=1e-5)
    session.optimizer(optimizer)
    monitor = session.watch(agent, optimizer)
    carts = CartPoles(NUM_CARTS, LONGEST, session.seed)
    bonus = session.number("entropy_weight", 0.01)
    state, lengths, recent = carts.reset(), torch.zeros(NUM_CARTS), [20.0]
    while not session.is_over():
        states, actions, log_probs, values, rewards, ends = [], [], [], [], [], []
        with torch.no_grad():
            for _ in range(ROLLOUT):
                logits, value = agent(session.pipeline(state))
                choice = Categorical(logits=logits)
                action = choice.sample()
                states.append(state)
                actions.append(action)
                log_probs.append(choice.log_prob(action))
                values.append(value)
                state, lost, over = carts.push(action)
                lengths += 1
                rewards.append(1 - lost.float())
                ends.append(over.float())
                if over.any():
                    recent += lengths[over].tolist()
                    lengths[over] = 0
                    state = carts.reset(over)
            gains: list[Tensor] = []
            following, advantage = agent(session.pipeline(state))[1], torch.zeros(NUM_CARTS)
            for index in reversed(range(ROLLOUT)):
                alive = 1 - ends[index]
                delta = rewards[index] + GAMMA * following * alive - values[index]
                advantage = delta + GAMMA * LAMBDA * alive * advantage
                gains.insert(0, advantage)
                following = values[index]
        seen, taken, before = torch.cat(states), torch.cat(actions), torch.cat(log_probs)
        advantages = torch.cat(gains)
        returns = advantages + torch.cat(values)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(seen)).split(256):
                inputs, chosen = session.batch(session.pipeline(seen[rows]), taken[rows])
                logits, value = agent(inputs)
                choice = Categorical(logits=logits)
                ratio = (choice.log_prob(chosen) - before[rows]).exp()
                gain = advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = -torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = 0.5 * (value - returns[rows]).pow(2).mean()
                loss = session.loss(policy_loss - bonus * choice.entropy().mean() + 0.5 * value_loss)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), session.number("clip", 0.5))
                optimizer.step()
                session.report(-sum(recent[-30:]) / len(recent[-30:]))
                monitor.step(loss)
                if session.is_over():
                    break
            if session.is_over():
                break
    return -sum(recent[-60:]) / len(recent[-60:])
