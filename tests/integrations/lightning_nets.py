"""Modules of Lightning and a short fit of them, for test_lightning.py, which imports this where it needs it."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from gradsan.integrations.lightning import GradsanCallback  # noqa: F401


class Net(pl.LightningModule):
    """A small net, trained by Lightning's automatic optimization; ``spoil`` is what goes wrong in batch 1."""

    def __init__(self, spoil="nothing"):
        super().__init__()
        self.spoil = spoil
        self.losses = []
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def loss(self, x, index):
        hidden = torch.tanh(self.first(x))
        if index == 1 and self.spoil == "in place":
            hidden += 1
        if index == 1 and self.spoil == "leaf":
            self.second.weight.mul_(2)
        if index == 1 and self.spoil == "elsewhere":
            raise LookupError("not autograd's")
        out = self.second(hidden).float()
        if index == 1 and self.spoil == "root":
            out = out + (out * 0).sqrt()
        value = out.square().mean()
        if index == 1 and self.spoil == "data":
            out.data.add_(1)
        self.losses.append(value.item())
        return value

    def training_step(self, batch, index):
        return self.loss(batch[0], index)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


class Manual(Net):
    """The same by manual optimization, stepping in every second batch."""

    def __init__(self, spoil="nothing"):
        super().__init__(spoil)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        value = self.loss(batch[0], index)
        self.manual_backward(value / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


class LossOfEachRow(Net):
    """Returns a loss that nothing has reduced; Lightning divides it, and calls backward."""

    def training_step(self, batch, index):
        error = self.second(self.first(batch[0])) - batch[0].sum(1, keepdim=True)
        return error.square() + 1e-3 * error.abs()


class CutInItsStep(Net):
    """Compares what has left the graph: in a helper, of which it returns the loss in a dictionary."""

    def compared(self, x):
        height = self.second(self.first(x)).data
        return {"loss": (height - x.sum(1, keepdim=True)).square().mean()}

    def training_step(self, batch, index):
        return self.compared(batch[0])


class SlopeInValidation(Net):
    """Asks for a derivative of its result where Lightning has gradients switched off."""

    def slope(self, x):
        x = x.clone().requires_grad_()
        height = self.second(torch.tanh(self.first(x)))
        return torch.autograd.grad(height.sum(), x)[0]

    def validation_step(self, batch, index):
        self.log("slope", self.slope(batch[0]).abs().mean())


class StepTooEarly(pl.LightningModule):
    """Two optimizers by hand; the generator's backward comes after the step of the discriminator that it needs."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(batch[0][:, :2])
        verdict = self.discriminator(fake)
        self.manual_backward(self.discriminator(fake.detach()).mean())
        for_discriminator.step()
        self.manual_backward(-verdict.mean())
        for_generator.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.discriminator)]


class CarriedState(pl.LightningModule):
    """A recurrent cell whose state goes from batch to batch with its graph."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.RNNCell(4, 4), torch.nn.Linear(4, 1)
        self.state = torch.zeros(4, 4)

    def training_step(self, batch, index):
        self.state = self.cell(batch[0], self.state)
        return self.head(self.state).mean()

    def backward(self, loss):
        loss.backward(retain_graph=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module, *callbacks, package=pl, **settings):
    """Train ``module`` on four fixed batches, twice."""
    trainer = package.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    batches = DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1))), 4)
    trainer.fit(module, batches, batches if isinstance(module, SlopeInValidation) else None)
    return trainer


def made(name, *words):
    torch.manual_seed(0)
    return globals()[name](*words)
