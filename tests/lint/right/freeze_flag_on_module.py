import torch
from torch import nn
import torch.nn.functional as F


class Finetune(nn.Module):
    def __init__(self, vocab, d, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.embed.weight.requires_grad = False
        self.head = nn.Linear(d, classes)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))
