"""An agent keeps its recurrent state from update to update; the loop around it also binds observations anew."""

import torch
from torch import nn

torch.manual_seed(0)


class World:
    def step(self, action):
        return torch.rand(1, 3) * action, torch.rand(1)


class Agent:
    def __init__(self):
        self.core, self.value = nn.GRUCell(3, 4), nn.Linear(4, 1)
        self.optimizer = torch.optim.RMSprop([*self.core.parameters(), *self.value.parameters()])
        self.state, self.values = torch.zeros(1, 4), []

    def act(self, seen):
        self.state = self.core(seen, self.state)
        self.values.append(self.value(self.state))
        return int(self.values[-1] > 0) + 1

    def learn(self, rewards):
        loss = sum((value - reward).pow(2).sum() for value, reward in zip(self.values, rewards, strict=True))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.values.clear()


agent, world = Agent(), World()
seen = torch.rand(1, 3)
for _ in range(2):
    rewards = []
    for _ in range(3):
        action = agent.act(seen)
        seen, reward = world.step(action)
        rewards.append(reward)
    agent.learn(rewards)
