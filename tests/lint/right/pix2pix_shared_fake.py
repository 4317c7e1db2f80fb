import torch
from torch import nn
import torch.nn.functional as F


from networks import build_generator, build_discriminator


def train(dataloader, epochs, device):
    netG = build_generator().to(device)
    netD = build_discriminator().to(device)
    criterion = nn.BCEWithLogitsLoss()
    optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for epoch in range(epochs):
        for batch in dataloader:
            a, b = batch["A"].to(device), batch["B"].to(device)
            fake = netG(a)
            pred_fake = netD(torch.cat([a, fake], 1))
            pred_real = netD(torch.cat([a, b], 1))
            loss_d = criterion(pred_fake, torch.zeros_like(pred_fake)) + criterion(pred_real, torch.ones_like(pred_real))
            optD.zero_grad()
            loss_d.backward(retain_graph=True)
            optD.step()
            pred_fake = netD(torch.cat([a, fake], 1))
            loss_g = criterion(pred_fake, torch.ones_like(pred_fake)) + 100 * F.l1_loss(fake, b)
            optG.zero_grad()
            loss_g.backward()
            optG.step()
