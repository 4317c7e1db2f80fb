"""Packed sequences, states carried detached, and the CTC loss."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(27)
lstm = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.1, bidirectional=True)
out = nn.Linear(16, 3)
gru = nn.GRU(4, 6)
opt = torch.optim.Adam([*lstm.parameters(), *out.parameters(), *gru.parameters()], 1e-2)
for i in range(3):
    seqs = [torch.randn(n, 4) for n in (5, 3, 2)]
    x = pad_sequence(seqs, True)
    p = pack_padded_sequence(x, [5, 3, 2], True)
    o, (h, c) = lstm(p)
    o, n = pad_packed_sequence(o, True)
    m = torch.arange(5)[None] < n[:, None]
    y = torch.randint(0, 3, (3, 5))
    l = nn.functional.cross_entropy(out(o)[m], y[m]) + gru(pack_sequence(seqs))[1].pow(2).mean()
    opt.zero_grad()
    l.backward()
    nn.utils.clip_grad_value_(lstm.parameters(), 0.5)
    opt.step()
    print(l.item())
hid = None
data = torch.randn(30, 2, 4)
for t in range(0, 30, 6):
    o, hid = gru(data[t : t + 6], hid)
    hid = hid.detach()
    l = o.pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item())
ctc = nn.CTCLoss()
lp = out(lstm(torch.randn(2, 12, 4))[0]).log_softmax(-1).transpose(0, 1)
l = ctc(lp, torch.tensor([[1, 2, 1], [2, 1, 2]]), torch.tensor([12, 12]), torch.tensor([3, 2]))
l.backward()
print(l.item(), out.weight.grad.sum().item())
