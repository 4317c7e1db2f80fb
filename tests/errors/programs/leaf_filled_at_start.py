from torch import nn


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.lin.bias[:2] = 1.0


Gate(4)
