import torch
import torch.nn as nn


class NextStep(nn.Module):
    """Predict the next value of a series; the hidden state goes in and comes out."""

    def __init__(self, cell="rnn", hidden_size=32):
        super().__init__()
        self.cell = cell
        self.hidden_size = hidden_size
        self.rnn = {"rnn": nn.RNN, "lstm": nn.LSTM}[cell](input_size=1, hidden_size=hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def init_hidden(self, batch):
        h = torch.zeros(1, batch, self.hidden_size)
        return (h, h.clone()) if self.cell == "lstm" else h

    def forward(self, x, h):
        out, h = self.rnn(x, h)
        return self.head(out), h
