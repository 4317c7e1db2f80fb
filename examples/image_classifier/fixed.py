"""Train an image classifier on CIFAR-10, on each batch as it is and once more augmented, with the right gradient.

The model is trained with ``--way``. ``--compare`` measures instead the gradient of each way, and of two that are none
(``.data``, and ``no_grad`` around the augmentation), against the true gradient.
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from augment import Augment
from cifar10 import CIFAR10, prepare
from models import MODELS


class OutOfPlaceAugment(Augment):
    """The same random changes, each in a new tensor: the batch that came in stays as it was."""

    def __call__(self, images):
        flipped, gain, top, left = self.draw(images)
        images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(-1), images)
        images = images * gain
        row = torch.arange(images.shape[2]).view(1, 1, -1, 1) - top.view(-1, 1, 1, 1)
        column = torch.arange(images.shape[3]).view(1, 1, 1, -1) - left.view(-1, 1, 1, 1)
        hole = (row >= 0) & (row < self.cutout) & (column >= 0) & (column < self.cutout)
        return images.masked_fill(hole, 0.0)


def out_of_place(model, images, labels, criterion, seed):
    """Augment into new tensors. Nothing that was saved is touched: the first choice."""
    loss = criterion(model(images), labels)
    images = OutOfPlaceAugment(seed=seed)(images)
    return loss + criterion(model(images), labels)


def clone(model, images, labels, criterion, seed):
    """Keep the in-place augmentation, on a copy. Right where the augmentation is not yours to change."""
    loss = criterion(model(images), labels)
    images = Augment(seed=seed)(images.clone())
    return loss + criterion(model(images), labels)


def no_grad(model, images, labels, criterion, seed):
    """Only look at the clean batch: without grad nothing is saved, and the batch may be overwritten.

    Right where the clean pass is there to be watched. It does not train on the clean batch any more.
    """
    with torch.no_grad():
        clean_loss = criterion(model(images), labels)
    images = Augment(seed=seed)(images)
    return clean_loss + criterion(model(images), labels)


def augment_data(model, images, labels, criterion, seed):
    """Augment ``images.data``. The same memory under another version counter: no error, and a wrong gradient."""
    loss = criterion(model(images), labels)
    Augment(seed=seed)(images.data)
    return loss + criterion(model(images), labels)


def augment_no_grad(model, images, labels, criterion, seed):
    """Put ``no_grad`` around the augmentation. The write is still a write: PyTorch still raises."""
    loss = criterion(model(images), labels)
    with torch.no_grad():
        images = Augment(seed=seed)(images)
    return loss + criterion(model(images), labels)


WAYS = {"out_of_place": out_of_place, "clone": clone, "no_grad": no_grad}


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def true_gradients(model, images, labels, criterion, seed):
    """Return the gradients of the clean and of the augmented loss, each from a forward and backward of its own."""
    clean = gradient(model, criterion(model(images), labels))
    augmented = gradient(model, criterion(model(Augment(seed=seed)(images.clone())), labels))
    return clean, augmented


def relative_error(found, true):
    return ((found - true).norm() / true.norm()).item()


def compare(model, images, labels, criterion, seed):
    clean, augmented = true_gradients(model, images, labels, criterion, seed)
    rows = [
        ("out_of_place", out_of_place, clean + augmented, "gradient of clean + augmented"),
        ("clone", clone, clean + augmented, "gradient of clean + augmented"),
        ("no_grad", no_grad, augmented, "gradient of augmented alone, as meant"),
        (".data", augment_data, clean + augmented, "gradient of clean + augmented"),
        ("no_grad around augment", augment_no_grad, clean + augmented, "gradient of clean + augmented"),
    ]
    print(f"{'way':<24}{'relative error':<16}measured against")
    for name, way, true, against in rows:
        try:
            error = f"{relative_error(gradient(model, way(model, images.clone(), labels, criterion, seed)), true):.1e}"
        except RuntimeError:
            error = "raises"
        print(f"{name:<24}{error:<16}{against}")


def train_one_epoch(model, loader, way, criterion, optimizer, epoch, seed):
    model.train()
    total = 0.0
    with tqdm(loader, desc=f"epoch {epoch}", leave=False) as bar:
        for i, (images, labels) in enumerate(bar):
            optimizer.zero_grad()
            loss = way(model, images, labels, criterion, seed=seed + epoch * len(loader) + i)
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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).parent / "data", help="folder with CIFAR-10, binary version"
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="linear")
    parser.add_argument("--way", choices=list(WAYS), default="out_of_place", help="the way to train with")
    parser.add_argument("--compare", action="store_true", help="measure the gradient of each way instead of training")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)

    root = prepare(args.data)
    train_loader = DataLoader(CIFAR10(root, train=True), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(CIFAR10(root, train=False), batch_size=256)

    model = MODELS[args.model]()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    if args.compare:
        compare(model, *next(iter(train_loader)), criterion, args.seed)
        return

    for epoch in range(1, args.epochs + 1):
        loss = train_one_epoch(model, train_loader, WAYS[args.way], criterion, optimizer, epoch, args.seed)
        accuracy = evaluate(model, test_loader)
        print(f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
