import torch
from torch import nn

torch.manual_seed(111)
lstm, head = nn.LSTM(2, 5, num_layers=2), nn.Linear(5, 2)
opt = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
state = None
for chunk in torch.randn(4, 6, 3, 2):
    if state is not None:
        state = tuple(s.detach() for s in state)
    out, state = lstm(chunk, state)
    loss = head(out).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"checksum {loss.item():.6f}")
