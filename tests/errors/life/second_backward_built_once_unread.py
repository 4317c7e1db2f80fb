import torch
from torch import nn

torch.manual_seed(0)
places = nn.Embedding(6, 4)
words = nn.Embedding(20, 4)
head = nn.Linear(4, 3)
optimizer = torch.optim.SGD([*places.parameters(), *words.parameters(), *head.parameters()], lr=0.1)
positions = places(torch.arange(6))
for _ in range(2):
    sentence = torch.randint(0, 20, (2, 6))
    loss = head(words(sentence) + positions).logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
