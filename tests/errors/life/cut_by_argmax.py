import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
logits = model(x)
pred = logits.argmax(dim=1)
loss = F.mse_loss(pred.float(), y.float())
loss.backward()
