import torch
from torch import nn


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.RNNCell(hidden, hidden)
        self.out = nn.Linear(hidden, vocab)
        self.hidden = torch.zeros(1, hidden)

    def forward(self, ch):
        self.hidden = self.rnn(self.emb(ch), self.hidden)
        return self.out(self.hidden)


torch.manual_seed(21)
model = CharRNN(8, 6)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
text = torch.randint(0, 8, (6,))
for cur, nxt in zip(text[:-1], text[1:]):
    loss = criterion(model(cur.view(1)), nxt.view(1))
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
print(f"checksum {loss.item():.6f}")
