from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical


@dataclass
class Memory:
    h: torch.Tensor
    c: torch.Tensor


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.policy, self.value = nn.LSTMCell(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def act(self, obs, mem):
        mem.h, mem.c = self.lstm(obs, (mem.h, mem.c))
        return Categorical(logits=self.policy(mem.h)), self.value(mem.h)


def a2c_loss(dist, action, value, reward):
    advantage = reward - value.squeeze(-1)
    return (-dist.log_prob(action) * advantage.detach() + advantage.pow(2)).mean()


class Trainer:
    def __init__(self, agent):
        self.agent, self.mem = agent, Memory(torch.zeros(2, 8), torch.zeros(2, 8))
        self.optim = torch.optim.Adam(agent.parameters(), lr=3e-3)

    def train_step(self, obs):
        dist, value = self.agent.act(obs, self.mem)
        action = dist.sample()
        loss = a2c_loss(dist, action, value, (action == 0).float())
        self.optim.zero_grad()
        loss.backward(retain_graph=True)
        nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
        self.optim.step()
        return loss.item()


torch.manual_seed(24)
agent = Agent()
trainer = Trainer(agent)
history = [trainer.train_step(torch.randn(2, 3)) for _ in range(4)]
print(f"checksum {sum(history):.6f}")
