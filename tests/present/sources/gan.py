import torch
from model import Discriminator
from torch import nn


def train_step(generator, discriminator, real, noise, g_optimizer, d_optimizer):
    bce = nn.functional.binary_cross_entropy_with_logits
    fake = generator(noise)
    fake_score = discriminator(fake)
    real_score = discriminator(real)
    d_loss = bce(real_score, torch.ones_like(real_score)) + bce(fake_score, torch.zeros_like(fake_score))
    g_loss = bce(fake_score, torch.ones_like(fake_score))

    d_optimizer.zero_grad()
    d_loss.backward(retain_graph=True)
    d_optimizer.step()

    g_optimizer.zero_grad()
    g_loss.backward()
    g_optimizer.step()


def main():
    generator, discriminator = nn.Linear(2, 8), Discriminator()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
    for _ in range(3):
        train_step(generator, discriminator, torch.randn(5, 8), torch.randn(5, 2), *optimizers)


if __name__ == "__main__":
    main()
