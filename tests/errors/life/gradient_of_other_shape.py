"""A gradient of one element in a vector is passed in for a mean, which has no dimension."""

import torch

torch.manual_seed(0)
critic = torch.nn.Linear(4, 1)
one = torch.ones(1)
minus_one = -one
score = critic(torch.randn(8, 4)).mean()
score.backward(minus_one)
score = critic(torch.randn(8, 4)).mean()
score.backward(one)
