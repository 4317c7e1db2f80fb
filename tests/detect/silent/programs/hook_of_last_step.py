import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.rnn = nn.GRU(6, 5, batch_first=True)
        self.out = nn.Linear(5, 2)
        self.norms = []

    def forward(self, ids, mask):
        h, _ = self.rnn(self.emb(ids))
        feat = h[:, -1]
        feat.register_hook(lambda g: self.norms.append(g.norm().item()))
        feat[mask] = 0.0
        return self.out(feat)


torch.manual_seed(1)
net = Net()
opt = torch.optim.Adam(net.parameters())
for _ in range(4):
    loss = net(torch.randint(0, 10, (5, 7)), torch.tensor([True, False, False, True, False])).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(len(net.norms))
