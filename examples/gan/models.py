import torch.nn as nn


class Upsample(nn.Sequential):
    """Twice the height and width by a convolution and PixelShuffle."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, 4 * out_channels, 3, padding=1, bias=False),
            nn.PixelShuffle(2),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class Generator(nn.Module):
    def __init__(self, latent=32, width=16):
        super().__init__()
        self.project = nn.Linear(latent, 4 * width * 4 * 4)
        self.net = nn.Sequential(
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            Upsample(4 * width, 2 * width),
            Upsample(2 * width, width),
            Upsample(width, width),
            nn.Conv2d(width, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(self.project(z).unflatten(1, (-1, 4, 4)))


class Discriminator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 4 * width, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(4 * width, 1, 4),
        )

    def forward(self, images):
        return self.net(images).flatten()


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)
