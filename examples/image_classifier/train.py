"""Train an image classifier on CIFAR-10, on each batch as it is and once more augmented."""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from augment import Augment
from cifar10 import CIFAR10, prepare
from models import MODELS


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parent / "data", help="folder with CIFAR-10, binary version"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="linear")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_one_epoch(model, loader, augment, criterion, optimizer, epoch):
    model.train()
    total = 0.0
    with tqdm(loader, desc=f"epoch {epoch}", leave=False) as bar:
        for images, labels in bar:
            optimizer.zero_grad()

            logits = model(images)
            loss = criterion(logits, labels)

            images = augment(images)
            logits = model(images)
            loss = loss + criterion(logits, labels)

            loss.backward()
            optimizer.step()

            total += loss.item()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return total / len(loader)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    return correct / len(loader.dataset)


def main():
    args = parse_args()
    torch.manual_seed(args.seed)

    root = prepare(args.data)
    train_loader = DataLoader(CIFAR10(root, train=True), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(CIFAR10(root, train=False), batch_size=256)

    model = MODELS[args.model]()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    augment = Augment(seed=args.seed)

    for epoch in range(1, args.epochs + 1):
        loss = train_one_epoch(model, train_loader, augment, criterion, optimizer, epoch)
        accuracy = evaluate(model, test_loader)
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
