import torch
from torch import nn

rnn = nn.RNN(1, 1)
opt = torch.optim.Adadelta(rnn.parameters())
x = torch.randn(5, 1, 1, 1)
h = torch.zeros(1, 1, 1)
for i in range(4):
    opt.zero_grad()
    out, h_next = rnn(x[i], h)
    loss = (out - x[i + 1]).square().mean()
    loss.backward(retain_graph=True)
    opt.step()
    h = h_next
