"""The programs in examples/: each train.py fails as its README says, each fixed.py runs and learns."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from example_programs import BROKEN, EXAMPLES, NAMES, RIGHT, case_id, last_line, load, own_frames, run_example, series


@pytest.mark.parametrize(("example", "arguments", "stopped_at", "error"), BROKEN, ids=case_id)
def test_broken_program_fails_with_pytorchs_own_error(
    example: str, arguments: tuple[str, ...], stopped_at: str, error: str
) -> None:
    done = run_example(example, "train.py", *arguments)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(error, last_line(done.stderr)), done.stderr
    assert own_frames(done.stderr)[-1][1] == stopped_at


@pytest.mark.parametrize(("example", "arguments", "falling"), RIGHT, ids=case_id)
def test_fixed_program_learns(example: str, arguments: tuple[str, ...], falling: tuple[str, ...]) -> None:
    done = run_example(example, "fixed.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert ".grad attribute" not in done.stderr
    for quantity in falling:
        values = series(done.stdout, quantity)
        assert len(values) >= 3
        assert values[-1] < 0.9 * values[0], f"{quantity}: {values}"


@pytest.mark.parametrize("example", [name for name in NAMES if name != "image_classifier"])
def test_fixed_differs_from_train_in_a_few_lines(example: str) -> None:
    train, fixed = ((EXAMPLES / example / name).read_text().splitlines() for name in ("train.py", "fixed.py"))
    changed = set(train) ^ set(fixed)
    assert 0 < len(changed) <= 20, sorted(changed)


def test_anomaly_mode_says_what_the_readme_shows() -> None:
    done = run_example("rnn_sequence", "train.py", "--anomaly")
    readme = (EXAMPLES / "rnn_sequence" / "README.md").read_text()
    for text in (done.stderr, readme):
        assert "Error detected in AddmmBackward0. Traceback of forward call that caused the error:" in text
        assert "Good luck!" in text
    assert own_frames(done.stderr) == own_frames(readme)
    assert len(own_frames(readme)) == 5
    assert "optimizer.step()" not in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_readme_shows_the_error(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text()
    error = next(error for example, arguments, _, error in BROKEN if example == name and not arguments)
    assert re.search(error, readme)
    assert f"({name}/README.md)" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("model", ["linear", "cnn"])
def test_data_is_measured_to_be_the_wrong_way(model: str) -> None:
    done = run_example("image_classifier", "fixed.py", "--compare", "--model", model)
    measured = dict(re.findall(r"^(\S.*?)  +(\S+)  +gradient of", done.stdout, re.MULTILINE))
    for way in ("out_of_place", "clone", "no_grad"):
        assert float(measured[way]) < 1e-5
    assert float(measured[".data"]) > 1e-2
    assert measured["no_grad around augment"] == "raises"


@pytest.fixture(scope="module")
def cifar10() -> ModuleType:
    return load(EXAMPLES / "image_classifier" / "cifar10.py")


def write_true_format(folder: Path, records: int = 3) -> None:
    """Write CIFAR-10 files byte by byte from the format's description: label, then the red, green and blue plane."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate([f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]):
        body = bytearray()
        for record in range(records):
            body.append((number + record) % 10)
            body += bytes([10]) * 1024 + bytes([20]) * 1024 + bytes(range(256)) * 4
        (folder / name).write_bytes(body)
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    (folder / "batches.meta.txt").write_text(names.replace(" ", "\n") + "\n\n")


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin"])
def test_true_files_are_found_and_read(cifar10: ModuleType, tmp_path: Path, below: str) -> None:
    write_true_format(tmp_path / below)
    root = cifar10.prepare(tmp_path)
    assert root == tmp_path / below

    train, test = cifar10.CIFAR10(root, train=True), cifar10.CIFAR10(root, train=False)
    assert (len(train), len(test)) == (15, 3)
    assert train.labels.tolist() == [(i + j) % 10 for i in range(5) for j in range(3)]
    assert test.labels.tolist() == [5, 6, 7]
    assert train.names[3] == "cat"
    assert train.images[0, 0].unique().tolist() == [10]
    assert train.images[0, 1].unique().tolist() == [20]
    assert train.images[0, 2, 0].tolist() == list(range(32))
    assert train.images[0, 2, 1].tolist() == list(range(32, 64))

    image, label = train[4]
    assert (tuple(image.shape), str(image.dtype), label) == ((3, 32, 32), "torch.float32", 2)
    assert image[0, 0, 0].item() == pytest.approx((10 / 255 - 0.4914) / 0.2470)


def test_written_batches_have_the_true_format(cifar10: ModuleType, tmp_path: Path) -> None:
    cifar10.write_small_set(tmp_path, per_file=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(cifar10.FILES)
    assert (tmp_path / "test_batch.bin").stat().st_size == 4 * 3073

    images, labels = cifar10.read_batch(tmp_path / "data_batch_2.bin")
    cifar10.write_batch(tmp_path / "again.bin", images, labels)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "data_batch_2.bin").read_bytes()
    assert np.unique(images).size > 50


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes is not a whole number"),
        (bytes(3072), "3072 bytes is not a whole number"),
        (bytes([10]) + bytes(3072), "label 10 found"),
    ],
)
def test_damaged_file_is_refused(cifar10: ModuleType, tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        cifar10.read_batch(tmp_path / "data_batch_1.bin")


def test_part_of_cifar10_is_refused_and_left_alone(cifar10: ModuleType, tmp_path: Path) -> None:
    write_true_format(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin not found"):
        cifar10.prepare(tmp_path)
    assert not (tmp_path / "data_batch_3.bin").exists()


def test_small_set_is_written_once(
    cifar10: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cifar10, "__file__", str(tmp_path / "cifar10.py"))
    first = cifar10.prepare(tmp_path / "nothing")
    assert "writing a small set" in capsys.readouterr().err
    assert first == tmp_path / "data" / "small-set"
    assert list((tmp_path / "data").iterdir()) == [first]
    assert len(cifar10.CIFAR10(first, train=True)) == 5 * 128

    written = (first / "test_batch.bin").stat().st_mtime_ns
    assert cifar10.prepare(tmp_path / "nothing") == first
    assert (first / "test_batch.bin").stat().st_mtime_ns == written
    assert capsys.readouterr().err == ""


def test_small_set_goes_to_a_temporary_folder_where_it_cannot_be_written(
    cifar10: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_text("a file where the folder would be")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(cifar10, "__file__", str(tmp_path / "cifar10.py"))
    monkeypatch.setattr(cifar10.tempfile, "tempdir", str(tmp_path / "elsewhere"))
    folder = cifar10.prepare(tmp_path / "nothing")
    assert folder.parent == tmp_path / "elsewhere"
    assert len(cifar10.CIFAR10(folder, train=False)) == 128


def test_classifier_trains_on_given_files(tmp_path: Path) -> None:
    write_true_format(tmp_path, records=40)
    done = run_example("image_classifier", "fixed.py", "--data", str(tmp_path), "--epochs", "2", "--batch-size", "32")
    assert done.returncode == 0, done.stderr
    assert "small set" not in done.stderr
    assert len(series(done.stdout, "loss")) == 2
