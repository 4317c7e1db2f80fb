import torch
import torch.nn.functional as F
from torch import nn


def drop_words(sequence, share):
    sequence[torch.rand(sequence.shape) < share] = 0
    return sequence


torch.manual_seed(0)
embedding, output = nn.Embedding(12, 5), nn.Linear(5, 12)
for _ in range(3):
    tokens = torch.randint(1, 12, (6, 9))
    inputs = drop_words(tokens, 0.3)
    logits = output(embedding(inputs[:, :-1]))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
