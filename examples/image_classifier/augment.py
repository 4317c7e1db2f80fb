import torch


class Augment:
    """Random flip, brightness and cutout on a batch of images (n, 3, 32, 32)."""

    def __init__(self, flip=0.5, brightness=0.3, cutout=8, seed=0):
        self.flip = flip
        self.brightness = brightness
        self.cutout = cutout
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, images):
        n, _, height, width = images.shape
        flipped = torch.rand(n, generator=self.generator) < self.flip
        gain = 1 + self.brightness * (2 * torch.rand(n, 1, 1, 1, generator=self.generator) - 1)
        top = torch.randint(0, height - self.cutout, (n,), generator=self.generator)
        left = torch.randint(0, width - self.cutout, (n,), generator=self.generator)
        return flipped, gain, top, left

    def __call__(self, images):
        flipped, gain, top, left = self.draw(images)
        images[flipped] = images[flipped].flip(-1)
        images *= gain
        for i, (y, x) in enumerate(zip(top.tolist(), left.tolist())):
            images[i, :, y : y + self.cutout, x : x + self.cutout] = 0.0
        return images
