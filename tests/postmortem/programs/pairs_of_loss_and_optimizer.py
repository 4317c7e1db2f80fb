# GS110 critic.2.weight
import torch
from torch import nn

torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
of_actor, of_critic = torch.optim.Adam(actor.parameters()), torch.optim.Adam(critic.parameters())
made = actor(torch.randn(8, 4))
of_the_critic = critic(made.detach()).mean()
of_the_actor = -critic(made).mean()  # saved
for loss, optimizer in ((of_the_critic, of_critic), (of_the_actor, of_actor)):
    optimizer.zero_grad()
    loss.backward()  # used
    optimizer.step()  # written
