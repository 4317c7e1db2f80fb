import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
policy, value = nn.Linear(4, 2), nn.Linear(4, 1)
obs, returns = torch.randn(10, 4), torch.randn(10)
value_loss = (value(obs).squeeze(1) * returns).mean()
advantage = returns.numpy()
advantage -= advantage.mean()
np.clip(advantage, -1, 1, out=advantage)
log_prob = policy(obs).log_softmax(1)[:, 0]
loss = value_loss - (log_prob * torch.from_numpy(advantage)).mean()
loss.backward()
