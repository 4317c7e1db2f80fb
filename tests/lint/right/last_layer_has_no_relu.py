import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, activation="relu"):
        super().__init__()
        self.linear = nn.Linear(width, width)
        if activation == "leaky":
            self.activation = nn.LeakyReLU(0.2)
        elif activation == "relu":
            self.activation = nn.ReLU()
        else:
            self.activation = None

    def forward(self, x):
        x = self.linear(x)
        if self.activation:
            x = self.activation(x)
        return x


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = Block(width)
        self.second = Block(width, activation=None)

    def forward(self, x):
        y = self.second(self.first(x))
        y += x
        return y


class Perceptron(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.depth = depth
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) if i < self.depth - 1 else layer(x)
        return x


class Boxes(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.box = Perceptron(width, 3)
        self.reference = nn.Linear(width, 2)

    def forward(self, x):
        box = self.box(x)
        box[..., :2] += self.reference(x)
        return box.sigmoid()


class Folded(nn.Module):
    """A convolution whose result the activation overwrites, or a projection's: never what was kept."""

    def __init__(self, width, out):
        super().__init__()
        self.projects = width != out
        self.mix = nn.Conv2d(width, width, 1)
        self.project = nn.Conv2d(width, out, 1)
        self.activation = nn.ReLU(inplace=True)

    def folded(self, x):
        x = self.mix(x)
        if self.projects:
            x = self.project(x)
        return x.flatten(2)

    def forward(self, x):
        return self.activation(self.folded(x))
