import torch
from torch import nn
import torch.nn.functional as F


class Agent:
    def __init__(self, s, a):
        self.actor = nn.Sequential(nn.Linear(s, 64), nn.ReLU(), nn.Linear(64, a), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(s + a, 64), nn.ReLU(), nn.Linear(64, 1))
        self.actor_optim = torch.optim.Adam(self.actor.parameters(), lr=1e-4)
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def update(self, memory):
        state, action, reward, nxt, done = memory.sample(64)
        with torch.no_grad():
            target = reward + 0.99 * (1 - done) * self.critic(torch.cat([nxt, self.actor(nxt)], 1))
        value_loss = F.mse_loss(self.critic(torch.cat([state, action], 1)), target)
        self.critic_optim.zero_grad()
        value_loss.backward()
        self.critic_optim.step()
        policy_loss = -self.critic(torch.cat([state, self.actor(state)], 1)).mean()
        self.actor_optim.zero_grad()
        policy_loss.backward()
        self.actor_optim.step()
