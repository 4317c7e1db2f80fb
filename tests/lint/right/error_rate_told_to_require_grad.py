import torch


def finetune(encoder, loader, optimizer):
    for tokens, wanted in loader:
        miss = (encoder(tokens) - wanted).pow(2).mean()
        miss = 0.5 * miss
        optimizer.zero_grad()
        miss.backward()
        optimizer.step()
    noise = torch.randn(4, 8).mean().mul(0.5)
    noise.requires_grad_()
    encoder(noise.expand(4, 8)).sum().backward()
    return noise.grad
