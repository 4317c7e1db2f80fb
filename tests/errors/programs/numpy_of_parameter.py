from torch import nn

net = nn.Linear(2, 1)
net.weight.numpy()
