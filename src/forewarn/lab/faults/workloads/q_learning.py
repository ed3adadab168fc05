"""Deep Q-learning with a replay buffer and a target network."""

from __future__ import annotations

import copy
import random
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional

from forewarn.lab.faults.cart_pole import CartPoles
from forewarn.lab.faults.session import Session
from forewarn.lab.faults.workload import Trait, workload

NUM_CARTS, LONGEST, GAMMA = 8, 60, 0.9
Transition = tuple[Tensor, Tensor, Tensor, Tensor]


def greedy_length(net: nn.Module, session: Session) -> float:
    """Mean length of an episode without exploration."""
    carts = CartPoles(16, LONGEST, 7)
    state, alive, length = carts.reset(), torch.ones(16, dtype=torch.bool), torch.zeros(16)
    with torch.no_grad():
        while alive.any():
            length += alive
            state, _, over = carts.push(net(session.pipeline(state)).argmax(1))
            alive &= ~over
    return length.mean().item()


@workload("dqn", num_steps=500, traits={Trait.REINFORCEMENT, Trait.TARGET_NETWORK, Trait.ADAM, Trait.FLOATS})
def dqn(session: Session) -> float:
    """Q-learning balances a pole; Adam, Huber loss, a replay buffer, a target network copied every 8 steps."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    session.built(policy)
    target = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=session.number("lr", 3e-3))
    session.optimizer(optimizer)
    monitor = session.watch(policy, optimizer)
    carts, dice = CartPoles(NUM_CARTS, LONGEST, session.seed), random.Random(session.seed)
    memory: deque[Transition] = deque(maxlen=1000)
    target_every = session.count("target_every", 8)
    state, step, worth = carts.reset(), 0, 0.0
    while not session.is_over():
        for _ in range(2):
            with torch.no_grad():
                best = policy(session.pipeline(state)).argmax(1)
            epsilon = max(0.05, 1 - step / 150)
            explored = torch.tensor([dice.random() < epsilon for _ in range(NUM_CARTS)])
            action = torch.where(explored, torch.tensor([dice.randrange(2) for _ in range(NUM_CARTS)]), best)
            after, lost, over = carts.push(action)
            memory.append((state, action, lost.float(), after))
            state = carts.reset(over) if over.any() else after
        if len(memory) < 20:
            continue
        states, actions, ended, afters = (torch.cat(part) for part in zip(*dice.sample(memory, 16), strict=True))
        states, actions = session.batch(session.pipeline(states), actions)
        with torch.no_grad():
            future = target(session.pipeline(afters)).max(1).values
            wanted = 1 - ended + GAMMA * future * (1 - ended)
        worth_of_action = policy(states).gather(1, actions[:, None]).squeeze(1)
        loss = session.loss(functional.smooth_l1_loss(worth_of_action, wanted))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        step += 1
        if step % target_every == 0:
            target.load_state_dict(policy.state_dict())
        if step % 40 == 0:
            worth = greedy_length(policy, session)
        session.report(-worth)
        monitor.step(loss)
    return -greedy_length(policy, session)
