"""An actor and a critic on one trunk, with continuous actions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait, workload

NUM_SHIPS, ROLLOUT, LONGEST, GAMMA, CLIP, EPOCHS, PARTS = 32, 16, 32, 0.8, 0.2, 3, 2
SPEED, DRIFT = 0.3, 0.05


class Ships:
    """Ships in a plane, each with a port to reach. The reward falls with the distance from it."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._age = torch.arange(NUM_SHIPS) % LONGEST  # their episodes end at different times
        self.state = self._normal(NUM_SHIPS, 4)
        """The position of each ship, and that of its port."""

    def steer(self, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions around these means, their rewards, and which episodes are over: those ships start again."""
        action = mean + spread * self._normal(NUM_SHIPS, 2)
        place, port = self.state.split(2, dim=1)
        place = place + SPEED * action.clamp(-1, 1) + DRIFT * self._normal(NUM_SHIPS, 2)
        self._age += 1
        over = self._age >= LONGEST
        self._age[over] = 0
        self.state = torch.where(over[:, None], self._normal(NUM_SHIPS, 4), torch.cat([place, port], 1))
        return action, -(place - port).norm(dim=1), over

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 48), nn.ELU(), nn.Linear(48, 48), nn.ELU())
        self.mean = nn.Linear(48, 2)
        self.value = nn.Linear(48, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        nn.init.normal_(self.mean.weight, std=1e-3)
        nn.init.zeros_(self.mean.bias)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(state)
        return self.mean(features), self.value(features)


@workload("actor-critic", num_steps=300, traits={Trait.REINFORCEMENT, Trait.POLICY, Trait.ADAM, Trait.FLOATS})
def actor_critic(session: Session) -> float:
    """An actor and a critic steer ships to a port; one trunk, a policy that starts near zero, PPO's loss, Adam."""
    agent = ActorCritic()
    session.built(agent)
    optimizer = torch.optim.Adam(agent.parameters(), lr=session.number("lr", 3e-3))
    session.optimizer(optimizer)
    monitor = session.watch(agent, optimizer)
    bonus, limit = session.number("entropy_weight", 1e-3), session.number("clip", 1.0)
    ships = Ships(session.seed)
    worth: list[float] = []
    while not session.is_over():
        states, actions, rewards, ends = [], [], [], []
        with torch.no_grad():
            for _ in range(ROLLOUT):
                states.append(ships.state)
                mean, _ = agent(session.pipeline(ships.state))
                action, reward, over = ships.steer(mean, agent.log_std.exp())
                actions.append(action)
                rewards.append(reward)
                ends.append(over)
            worth.append(torch.stack(rewards).mean().item())
            running = agent(session.pipeline(ships.state))[1].squeeze(1)
            returns: list[Tensor] = []
            for reward, over in zip(reversed(rewards), reversed(ends), strict=True):
                running = reward + GAMMA * running * ~over
                returns.insert(0, running)
            seen, taken, wanted = torch.cat(states), torch.cat(actions), torch.cat(returns)
            mean, value = agent(session.pipeline(seen))
            before = Normal(mean, agent.log_std.exp()).log_prob(taken).sum(1)
            gain = wanted - value.squeeze(1)
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(seen)).chunk(PARTS):
                inputs, chosen = session.batch(session.pipeline(seen[rows]), taken[rows])
                mean, value = agent(inputs)
                policy = Normal(mean, agent.log_std.exp())
                ratio = (policy.log_prob(chosen).sum(1) - before[rows]).exp()
                surrogate = torch.min(gain[rows] * ratio, gain[rows] * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                error = nn.functional.smooth_l1_loss(value.squeeze(1), wanted[rows])
                loss = session.loss(error - surrogate - bonus * policy.entropy().mean())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), limit)
                optimizer.step()
                session.report(-worth[-1])
                monitor.step(loss)
                if session.is_over():
                    break
            if session.is_over():
                break
    return -sum(worth[-10:]) / len(worth[-10:])
