"""CIFAR-10, binary version (https://www.cs.toronto.edu/~kriz/cifar.html).

A file is a row of 3073-byte records: one label byte (0-9), then 3072 pixel bytes (1024 red, 1024 green,
1024 blue; each plane 32 x 32, row by row). There are five training files, one test file and a list of names.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

TRAIN_FILES = [f"data_batch_{i}.bin" for i in range(1, 6)]
TEST_FILES = ["test_batch.bin"]
NAMES_FILE = "batches.meta.txt"
FILES = [*TRAIN_FILES, *TEST_FILES, NAMES_FILE]
FOLDER_IN_ARCHIVE = "cifar-10-batches-bin"
RECORD_BYTES = 1 + 3 * 32 * 32
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]

MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class CIFAR10(Dataset):
    """Items are (image, label): float32 of shape (3, 32, 32), normalised per channel, and an int in 0-9."""

    def __init__(self, root, train=True):
        root = Path(root)
        batches = [read_batch(root / name) for name in (TRAIN_FILES if train else TEST_FILES)]
        self.images = torch.from_numpy(np.concatenate([images for images, _ in batches]))
        self.labels = torch.from_numpy(np.concatenate([labels for _, labels in batches]).astype(np.int64))
        self.names = (root / NAMES_FILE).read_text().split()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = (self.images[index].float() / 255 - MEAN) / STD
        return image, int(self.labels[index])


def read_batch(path):
    """Return (images, labels): uint8 arrays of shape (n, 3, 32, 32) and (n,)."""
    size = path.stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise ValueError(f"{path}: {size} bytes is not a whole number of {RECORD_BYTES}-byte records")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() >= len(NAMES):
        raise ValueError(f"{path}: label {labels.max()} found, CIFAR-10 has labels 0 to {len(NAMES) - 1}")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def write_batch(path, images, labels):
    """Write uint8 images (n, 3, 32, 32) and labels (n,) as 3073-byte records."""
    records = np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1).astype(np.uint8)
    records.tofile(path)


def prepare(root):
    """Return a folder with CIFAR-10 in it: ``root`` where it has the files, else a small generated set."""
    root = Path(root)
    for folder in (root, root / FOLDER_IN_ARCHIVE):
        missing = [name for name in FILES if not (folder / name).is_file()]
        if not missing:
            return folder
        if len(missing) < len(FILES):
            raise FileNotFoundError(f"{folder} has a part of CIFAR-10 only: {', '.join(missing)} not found")

    home = Path(__file__).parent / "data"
    small = home / "small-set"
    if not small.is_dir():
        print(f"no CIFAR-10 in {root}: writing a small set in its format", file=sys.stderr)
        try:
            home.mkdir(exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(dir=home))
        except OSError:
            small = unfinished = Path(tempfile.mkdtemp(prefix="cifar-10-"))
        write_small_set(unfinished)
        if small != unfinished:
            try:
                unfinished.rename(small)
            except OSError:  # another run has just finished the same set
                shutil.rmtree(unfinished)
    return small


def write_small_set(folder, per_file=128, seed=0):
    """Write all seven files with generated pictures: per class a faint coloured wave under shift, light and noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:32, 0:32] / 32
    waves = rng.integers(1, 4, size=(10, 3, 2))

    def picture(label):
        phase = waves[label] @ np.stack([y.ravel(), x.ravel()]) + rng.uniform(-0.2, 0.2)
        light = rng.uniform(0.35, 0.65) + rng.normal(0, 0.25, size=(3, 32, 32))
        image = light + 0.1 * np.sin(2 * np.pi * phase).reshape(3, 32, 32)
        return (image.clip(0, 1) * 255).astype(np.uint8)

    for name in [*TRAIN_FILES, *TEST_FILES]:
        labels = rng.integers(0, 10, size=per_file)
        write_batch(folder / name, np.stack([picture(label) for label in labels]), labels)
    (folder / NAMES_FILE).write_text("\n".join(NAMES) + "\n\n")
