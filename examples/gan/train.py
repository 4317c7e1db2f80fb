"""Train a small DCGAN with PixelShuffle on pictures of discs and squares."""

import argparse
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from data import make_shapes
from metrics import distance_to
from models import Discriminator, Generator, init_weights


@dataclass
class Config:
    epochs: int = 6
    pictures: int = 512
    batch_size: int = 32
    latent: int = 32
    width: int = 16
    g_lr: float = 1e-3
    d_lr: float = 1e-4
    beta1: float = 0.5
    seed: int = 0


def bce(logits, target):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


def main(config):
    torch.manual_seed(config.seed)
    dataset = make_shapes(config.pictures, seed=config.seed)
    loader = DataLoader(dataset, config.batch_size, shuffle=True, drop_last=True)
    held_out = make_shapes(256, seed=config.seed + 1).tensors[0]
    z_held_out = torch.randn(len(held_out), config.latent)

    G = Generator(config.latent, config.width).apply(init_weights)
    D = Discriminator(config.width).apply(init_weights)
    g_optimizer = torch.optim.Adam(G.parameters(), lr=config.g_lr, betas=(config.beta1, 0.999))
    d_optimizer = torch.optim.Adam(D.parameters(), lr=config.d_lr, betas=(config.beta1, 0.999))

    for epoch in range(1, config.epochs + 1):
        d_total, g_total = 0.0, 0.0
        with tqdm(loader, desc=f"epoch {epoch}", leave=False) as bar:
            for (real,) in bar:
                z = torch.randn(len(real), config.latent)
                fake = G(z)
                real_logits = D(real)
                fake_logits = D(fake)

                d_loss = bce(real_logits, 1.0) + bce(fake_logits, 0.0)
                g_loss = bce(fake_logits, 1.0)

                d_optimizer.zero_grad()
                d_loss.backward(retain_graph=True)
                d_optimizer.step()

                g_optimizer.zero_grad()
                g_loss.backward()
                g_optimizer.step()

                d_total += d_loss.item()
                g_total += g_loss.item()
                bar.set_postfix(d=f"{d_loss.item():.3f}", g=f"{g_loss.item():.3f}")
        n = len(loader)
        distance = distance_to(held_out, G, z_held_out)
        losses = f"d_loss {d_total / n:.4f}  g_loss {g_total / n:.4f}"
        print(f"epoch {epoch}/{config.epochs}  {losses}  distance {distance:.4f}")


def parse_config():
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Config):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    main(parse_config())
