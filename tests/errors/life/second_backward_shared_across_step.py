import torch
from torch import nn

torch.manual_seed(0)
maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
judge_optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
fake = torch.tanh(maker(torch.randn(4, 2)))
judge_loss = judge(fake).mean()
judge_loss.backward()
judge_optimizer.step()
maker_loss = -judge(fake).mean()
maker_loss.backward()
