"""Real trainings of Lightning, with the callback and without."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradsan
from forked import warm_python


@pytest.fixture(scope="module")
def lit():
    """Lightning takes seconds to import: none of it where another worker runs these tests."""
    pytest.importorskip("lightning")
    return importlib.import_module("lightning_nets")


@pytest.mark.parametrize("mode", ["watch", "deep"])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Net", {}),
        ("Manual", {}),
        ("Net", {"accumulate_grad_batches": 2}),
        ("Net", {"precision": "bf16-mixed"}),
        ("Net", {"gradient_clip_val": 0.1}),
    ],
    ids=["automatic", "manual", "accumulated", "bf16", "clipped"],
)
def test_a_right_training_is_the_same_with_it(lit, kind, settings, mode, capfd):
    plain = lit.made(kind)
    lit.fit(plain, **settings)
    plain_random = torch.random.get_rng_state()
    watched, callback = lit.made(kind), lit.GradsanCallback(mode)
    lit.fit(watched, callback, **settings)
    assert watched.losses == plain.losses
    assert len(watched.losses) == 8
    assert all(torch.equal(one, other) for one, other in zip(watched.parameters(), plain.parameters(), strict=True))
    assert torch.equal(torch.random.get_rng_state(), plain_random)
    report = callback.report
    assert report.diagnoses == ()
    assert report.mode == mode
    assert report.seen.backwards == 8
    assert report.seen.steps == (4 if kind == "Manual" or "accumulate_grad_batches" in settings else 8)
    assert report.seen.blind_spots == ()
    assert "gradsan" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["Net", "Manual"])
def test_a_failing_training_is_explained(lit, kind, tmp_path, capfd):
    names = dict(vars(torch.Tensor))
    with pytest.raises(RuntimeError) as plain:
        lit.fit(lit.made(kind, "in place"))
    callback = lit.GradsanCallback(json=str(tmp_path / "out.json"), html=str(tmp_path / "out.html"), language="en")
    with pytest.raises(RuntimeError) as caught:
        lit.fit(lit.made(kind, "in place"), callback)
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
    ("kind", "code"), [("StepTooEarly", "GS110"), ("CarriedState", "GS111")], ids=["step too early", "carried state"]
)
def test_writes_of_the_loop_between_forward_and_backward(lit, kind, code):
    callback = lit.GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lit.fit(lit.made(kind), callback)
    assert [one.code for one in callback.report.diagnoses] == [code]


def test_a_loss_that_is_no_number_is_reduced_where_it_is_made(lit):
    callback = lit.GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        lit.fit(lit.made("LossOfEachRow"), callback)
    [diagnosis] = callback.report.diagnoses
    assert (diagnosis.code, tuple(diagnosis.tensor.shape)) == ("GS408", (4, 1))
    made, needed = diagnosis.labels
    assert (made.role, made.frame.function) == ("created", "LossOfEachRow.training_step")
    assert needed.role == "used"
    [fix] = diagnosis.fixes
    assert [text.strip() for *_, text in fix.lines] == ["return (error.square() + 1e-3 * error.abs()).mean()"]


def test_a_cut_in_what_a_step_returns_is_found(lit):
    callback = lit.GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        lit.fit(lit.made("CutInItsStep"), callback)
    [diagnosis] = callback.report.diagnoses
    assert (diagnosis.code, diagnosis.title.key) == ("GS405", "title.loss_without_graph_cut")
    assert diagnosis.labels[0].frame.function.endswith("compared")
    assert [text.strip() for *_, text in diagnosis.fixes[0].lines] == ["height = self.second(self.first(x))"]


def test_a_derivative_in_validation_is_told_who_switched_gradients_off(lit):
    callback = lit.GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        lit.fit(lit.made("SlopeInValidation"), callback, num_sanity_val_steps=0)
    [diagnosis] = callback.report.diagnoses
    assert (diagnosis.code, diagnosis.tensor.name) == ("GS405", "height.sum()")
    [fix] = diagnosis.fixes
    assert fix.summary.values["library"] == "lightning"
    texts = [text.strip() for *_, whole in fix.lines for text in whole.splitlines()]
    assert texts == ["@torch.enable_grad()", "def slope(self, x):"]


def test_an_error_in_the_forward(lit, capfd):
    callback = lit.GradsanCallback(language="en")
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        lit.fit(lit.made("Net", "leaf"), callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS301"]
    assert "GS301" in caught.value.__notes__[0]
    assert "error[GS301]" in capfd.readouterr().err


def test_a_silent_finding_is_reported_at_the_end(lit, capfd):
    callback = lit.GradsanCallback(language="en")
    lit.fit(lit.made("Net", "data"), callback)
    [diagnosis] = callback.report.diagnoses
    assert (diagnosis.code, diagnosis.count) == ("GS202", 2)
    err = capfd.readouterr().err
    assert "out.data.add_(1)" in err
    assert err.count("error[GS202]") == 1


def test_an_error_that_is_not_autograds_gets_nothing(lit, capfd):
    callback = lit.GradsanCallback()
    with pytest.raises(LookupError) as caught:
        lit.fit(lit.made("Net", "elsewhere"), callback)
    assert not hasattr(caught.value, "__notes__")
    assert callback.report.diagnoses == ()
    assert callback.report.program.exception == ("LookupError", "not autograd's")
    assert "gradsan" not in capfd.readouterr().err


def test_each_fit_has_a_report_of_its_own(lit):
    callback = lit.GradsanCallback(quiet=True)
    with pytest.raises(RuntimeError):
        lit.fit(lit.made("Net", "in place"), callback)
    lit.fit(lit.made("Net"), callback)
    assert callback.report.diagnoses == ()


def test_inside_a_watch_the_callback_prints_nothing(lit, capfd):
    callback = lit.GradsanCallback()
    with gradsan.watch() as outer:
        lit.fit(lit.made("Net", "data"), callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS202"]
    assert [one.code for one in outer.diagnoses] == ["GS202"]
    assert "GS202" not in capfd.readouterr().err


def test_options_come_from_everywhere(lit, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.gradsan]\nignore = ["GS202"]\n')
    monkeypatch.setenv("GRADSAN_OPTIONS", "json=out.json:lang=zh")
    callback = lit.GradsanCallback()
    lit.fit(lit.made("Net", "data"), callback)
    assert callback.report.diagnoses == ()
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["diagnoses"] == []
    assert "GS202" in capfd.readouterr().err, "a suppression that was met is said"


def test_a_file_that_cannot_be_written_ends_it_before_it_begins(lit, tmp_path):
    module = lit.made("Net")
    with pytest.raises(ValueError, match="cannot be written"):
        lit.fit(module, lit.GradsanCallback(json=str(tmp_path / "nowhere" / "out.json"), language="en"))
    assert module.losses == []


def test_the_other_package_of_lightning(lit, monkeypatch):
    """A program that has imported ``pytorch_lightning`` and not ``lightning`` gets a callback of that."""
    other = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    spec = importlib.util.find_spec("gradsan.integrations.lightning")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.GradsanCallback, other.Callback)
    assert not issubclass(module.GradsanCallback, lit.pl.Callback)

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
    lit.fit(Small(), callback, package=other)
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


def test_every_rank_writes_its_own_file_and_one_prints(lit, tmp_path: Path):
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


def test_the_origin_of_nan_is_found_in_a_fit(lit):
    callback = lit.GradsanCallback("nonfinite", quiet=True)
    lit.fit(lit.made("Net", "root"), callback)
    (found,) = callback.report.diagnoses
    assert (found.code, found.nonfinite.op, found.nonfinite.round) == ("GS602", "sqrt", 1)
    assert [label.frame.function for label in found.labels if label.role == "origin"] == ["Net.loss"]
