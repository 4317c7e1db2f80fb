"""Real trainings of Lightning, with the callback and without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradsan
from forked import warm_python

pytest.importorskip("lightning")

import lightning.pytorch as pl

from gradsan.integrations.lightning import GradsanCallback


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
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(TensorDataset(data), 4))
    return trainer


def made(kind, *words):
    torch.manual_seed(0)
    return kind(*words)


@pytest.mark.parametrize("mode", ["watch", "deep"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Net, {}),
        (Manual, {}),
        (Net, {"accumulate_grad_batches": 2}),
        (Net, {"precision": "bf16-mixed"}),
        (Net, {"gradient_clip_val": 0.1}),
    ],
    ids=["automatic", "manual", "accumulated", "bf16", "clipped"],
)
def test_a_right_training_is_the_same_with_it(kind, settings, mode, capfd):
    plain = made(kind)
    fit(plain, **settings)
    plain_random = torch.random.get_rng_state()
    watched, callback = made(kind), GradsanCallback(mode)
    fit(watched, callback, **settings)
    assert watched.losses == plain.losses
    assert len(watched.losses) == 8
    assert all(torch.equal(one, other) for one, other in zip(watched.parameters(), plain.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), plain_random)
    report = callback.report
    assert report.diagnoses == ()
    assert report.mode == mode
    assert report.seen.backwards == 8
    assert report.seen.steps == (4 if kind is Manual or "accumulate_grad_batches" in settings else 8)
    assert report.seen.blind_spots == ()
    assert "gradsan" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [Net, Manual])
def test_a_failing_training_is_explained(kind, tmp_path, capfd):
    names = dict(vars(torch.Tensor))
    with pytest.raises(RuntimeError) as plain:
        fit(made(kind, "in place"))
    callback = GradsanCallback(json=str(tmp_path / "out.json"), html=str(tmp_path / "out.html"), language="en")
    with pytest.raises(RuntimeError) as caught:
        fit(made(kind, "in place"), callback)
    assert str(caught.value) == str(plain.value)
    [note] = caught.value.__notes__
    assert "error[GS101]" in note
    assert "hidden += 1" in note
    [diagnosis] = callback.report.diagnoses
    assert diagnosis.code == "GS101"
    assert callback.report.program.outcome == "failed"
    assert capfd.readouterr().err.count("error[GS101]") == 1
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [one["code"] for one in written["diagnoses"]] == ["GS101"]
    assert "GS101" in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert dict(vars(torch.Tensor)) == names, "torch is as it was"


@pytest.mark.parametrize(
    ("kind", "code"), [(StepTooEarly, "GS110"), (CarriedState, "GS111")], ids=["step too early", "carried state"]
)
def test_writes_of_the_loop_between_forward_and_backward(kind, code):
    callback = GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(made(kind), callback)
    assert [one.code for one in callback.report.diagnoses] == [code]


def test_an_error_in_the_forward(capfd):
    callback = GradsanCallback(language="en")
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        fit(made(Net, "leaf"), callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS301"]
    assert "GS301" in caught.value.__notes__[0]
    assert "error[GS301]" in capfd.readouterr().err


def test_a_silent_finding_is_reported_at_the_end(capfd):
    callback = GradsanCallback(language="en")
    fit(made(Net, "data"), callback)
    [diagnosis] = callback.report.diagnoses
    assert (diagnosis.code, diagnosis.count) == ("GS202", 2)
    err = capfd.readouterr().err
    assert "out.data.add_(1)" in err
    assert err.count("error[GS202]") == 1


def test_an_error_that_is_not_autograds_gets_nothing(capfd):
    callback = GradsanCallback()
    with pytest.raises(LookupError) as caught:
        fit(made(Net, "elsewhere"), callback)
    assert not hasattr(caught.value, "__notes__")
    assert callback.report.diagnoses == ()
    assert callback.report.program.exception == ("LookupError", "not autograd's")
    assert "gradsan" not in capfd.readouterr().err


def test_each_fit_has_a_report_of_its_own():
    callback = GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError):
        fit(made(Net, "in place"), callback)
    fit(made(Net), callback)
    assert callback.report.diagnoses == ()


def test_inside_a_watch_the_callback_prints_nothing(capfd):
    callback = GradsanCallback()
    with gradsan.watch() as outer:
        fit(made(Net, "data"), callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS202"]
    assert [one.code for one in outer.diagnoses] == ["GS202"]
    assert "GS202" not in capfd.readouterr().err


def test_options_come_from_everywhere(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.gradsan]\nignore = ["GS202"]\n')
    monkeypatch.setenv("GRADSAN_OPTIONS", "json=out.json:lang=zh")
    callback = GradsanCallback()
    fit(made(Net, "data"), callback)
    assert callback.report.diagnoses == ()
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["diagnoses"] == []
    assert "GS202" in capfd.readouterr().err, "a suppression that was met is said"


def test_a_file_that_cannot_be_written_ends_it_before_it_begins(tmp_path):
    module = made(Net)
    with pytest.raises(ValueError, match="cannot be written"):
        fit(module, GradsanCallback(json=str(tmp_path / "nowhere" / "out.json"), language="en"))
    assert module.losses == []


def test_the_other_package_of_lightning(monkeypatch):
    """A program that has imported ``pytorch_lightning`` and not ``lightning`` gets a callback of that."""
    other = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    spec = importlib.util.find_spec("gradsan.integrations.lightning")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.GradsanCallback, other.Callback)
    assert not issubclass(module.GradsanCallback, pl.Callback)

    class Small(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            curve = self.layer(batch[0]).exp()
            curve.data.mul_(2)
            return curve.mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = module.GradsanCallback(quiet=True)
    fit(Small(), callback, package=other)
    assert [one.code for one in callback.report.diagnoses] == ["GS202"]


RANKS = """
import torch, lightning.pytorch as pl
from torch.utils.data import DataLoader, TensorDataset
from gradsan.integrations.lightning import GradsanCallback

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        value = self.layer(batch[0]).exp()
        value.data.mul_(2)
        return value.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[GradsanCallback(json="out.json", language="en")])
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 4)), 4))
"""


def test_every_rank_writes_its_own_file_and_one_prints(tmp_path: Path):
    (tmp_path / "main.py").write_text(RANKS)
    python, own = warm_python()
    env = {**os.environ, **own}
    done = subprocess.run([python, "main.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("out.*"))
    assert [file.name.split(".")[1] for file in files] == ["rank0", "rank1"]
    for file in files:
        assert [one["code"] for one in json.loads(file.read_text(encoding="utf-8"))["diagnoses"]] == ["GS202"]
    assert done.stderr.count("error[GS202]") == 1
    assert "rank 0 of 2 reports" in done.stderr


def test_the_origin_of_nan_is_found_in_a_fit():
    callback = GradsanCallback("nonfinite", quiet=True)
    fit(made(Net, "root"), callback)
    (found,) = callback.report.diagnoses
    assert (found.code, found.nonfinite.op, found.nonfinite.round) == ("GS602", "sqrt", 1)
    assert [label.frame.function for label in found.labels if label.role == "origin"] == ["Net.loss"]
