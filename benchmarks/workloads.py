"""The training steps whose cost under gradsan is measured, smallest first.

Each ``build`` seeds torch, makes model, data and optimizer, and gives a function that does one whole training step:
``zero_grad``, forward, backward, optimizer step. None of them has a conflict, and none diverges, however long it runs.
All is made on torch's default device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Workload:
    """A training step with a name; ``aim`` is the highest ratio gradsan's watch mode is meant to cost on it.

    ``smallest`` builds a step of the same operations on the smallest tensors, where that is another one.
    """

    key: str
    title: str
    aim: float
    build: Callable[[], Step]
    smallest: Callable[[], Step] | None = None


def small_rnn() -> Step:
    """One unit, one sequence element a step: nothing but overhead."""
    rnn = nn.RNN(1, 1)
    optimizer = torch.optim.Adadelta(rnn.parameters(), lr=0.1)
    sequence = torch.sin(torch.arange(64.0)).reshape(64, 1, 1, 1)
    hidden = torch.zeros(1, 1, 1)
    position = 0

    def step() -> None:
        nonlocal hidden, position
        optimizer.zero_grad()
        output, carried = rnn(sequence[position], hidden)
        loss = (output - sequence[(position + 1) % 64]).pow(2).mean()
        loss.backward()
        optimizer.step()
        hidden = carried.detach()
        position = (position + 1) % 64

    return step


def deep_mlp() -> Step:
    """Twenty narrow layers: many saves, little arithmetic."""
    layers: list[nn.Module] = []
    for _ in range(19):
        layers += [nn.Linear(32, 32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 32)
    targets = inputs.mean(dim=1, keepdim=True)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def lstm_cell_loop() -> Step:
    """An LSTM cell called fifty times from a Python loop."""
    cell = nn.LSTMCell(16, 32)
    head = nn.Linear(32, 16)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    sequence = torch.randn(51, 8, 16) * 0.5
    device = sequence.device

    def step() -> None:
        optimizer.zero_grad()
        hidden, state = torch.zeros(8, 32, device=device), torch.zeros(8, 32, device=device)
        loss = torch.zeros((), device=device)
        for now in range(50):
            hidden, state = cell(sequence[now], (hidden, state))
            loss = loss + nn.functional.mse_loss(head(hidden), sequence[now + 1])
        (loss / 50).backward()
        optimizer.step()

    return step


def linear_classifier() -> Step:
    """Softmax regression on batches of the shape of CIFAR-10."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    images = torch.rand(64, 3, 32, 32)
    classes = torch.randint(10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()

    return step


def convolutional_gan(batch: int = 64) -> Step:
    """Generator and discriminator of a small convolutional GAN, one update of each."""

    def up(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out * 4, 3, padding=1), nn.PixelShuffle(2), nn.BatchNorm2d(out), nn.ReLU()]

    def down(channels: int, out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out, 3, stride=2, padding=1), nn.BatchNorm2d(out), nn.LeakyReLU(0.2)]

    generator = nn.Sequential(
        nn.Linear(100, 64 * 8 * 8),
        nn.Unflatten(1, (64, 8, 8)),
        *up(64, 64),
        *up(64, 32),
        nn.Conv2d(32, 3, 3, padding=1),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(*down(3, 32), *down(32, 64), *down(64, 128), nn.Flatten(), nn.Linear(128 * 4 * 4, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-5, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-5, betas=(0.5, 0.999))
    real = torch.rand(batch, 3, 32, 32) * 2 - 1
    noise = torch.randn(batch, 100)
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)
    loss_of = nn.BCEWithLogitsLoss()

    def step() -> None:
        fake = generator(noise)
        discriminator_optimizer.zero_grad()
        (loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)).backward()
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        loss_of(discriminator(fake), ones).backward()
        generator_optimizer.step()

    return step


def bert(batch: int = 8, length: int = 64) -> Step:
    """Sequence classification with a four-layer encoder of width 256, ``batch`` sequences of ``length`` tokens.

    ``transformers``' BertModel with random weights; where transformers is not installed, torch's own encoder of the
    same sizes.
    """
    tokens = torch.randint(1000, (batch, length))
    classes = torch.randint(2, (batch,))
    encoder: nn.Module
    first_token: Callable[[], torch.Tensor]
    try:
        from transformers import BertConfig, BertModel
    except ImportError:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        encoder = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4))

        def first_token() -> torch.Tensor:
            output: torch.Tensor = encoder(tokens)
            return output[:, 0]
    else:
        config = BertConfig(
            vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
        )
        encoder = BertModel(config)

        def first_token() -> torch.Tensor:
            output: torch.Tensor = encoder(input_ids=tokens).last_hidden_state
            return output[:, 0]

    head = nn.Linear(256, 2)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(first_token()), classes).backward()
        optimizer.step()

    return step


def gpt(batch: int = 8, length: int = 512) -> Step:
    """A language model of the size of GPT-2 small (124 million parameters, random weights) under bfloat16 autocast.

    Raises ImportError without transformers.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(50_000, (batch, length))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()

    return step


WORKLOADS = (
    Workload("rnn", "RNN of the smallest size, Adadelta", 1.20, small_rnn),
    Workload("mlp", "20-layer MLP, width 32", 1.25, deep_mlp),
    Workload("lstm", "LSTM cell loop, 50 steps", 1.25, lstm_cell_loop),
    Workload("linear", "linear classifier on CIFAR shapes, Adam", 1.05, linear_classifier),
    Workload("gan", "GAN (conv), batch 64", 1.01, convolutional_gan, lambda: convolutional_gan(1)),
    Workload("bert", "BERT 4 × 256, batch 8 × 64", 1.01, bert, lambda: bert(1, 2)),
)
# Too large for a processor.
DEVICE_WORKLOADS = (Workload("gpt", "GPT-2 small, batch 8 × 512, bfloat16 autocast", 1.01, gpt),)
