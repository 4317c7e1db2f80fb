"""Real trainings of a small BERT by the Trainer of transformers, with the callback and without."""

from __future__ import annotations

import importlib
import json

import pytest
import torch


@pytest.fixture(scope="module")
def hf():
    """Models take seconds to import: none of it where another worker runs these tests."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return importlib.import_module("bert_training")


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, "watch"),
        ({}, "deep"),
        ({"gradient_accumulation_steps": 2}, "watch"),
        ({"bf16": True}, "watch"),
        ({"gradient_checkpointing": True}, "watch"),
    ],
    ids=["plain", "deep", "accumulated", "bf16", "checkpointed"],
)
def test_a_right_training_is_the_same_with_it(hf, settings, mode, tmp_path, capfd):
    plain, plain_losses = hf.train(hf.bert(), tmp_path, **settings)
    random = torch.random.get_rng_state()
    callback = hf.GradsanCallback(mode)
    watched, losses = hf.train(hf.bert(), tmp_path, callback, **settings)
    assert losses == plain_losses
    assert len(losses) == (4 if "gradient_accumulation_steps" in settings else 8)
    pairs = zip(watched.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert callback.report.diagnoses == ()
    assert callback.report.mode == mode
    assert callback.report.seen.steps == len(losses)
    assert callback.report.seen.backwards >= 8
    assert "gradsan" not in capfd.readouterr().err
    assert "training_step" not in vars(watched), "the Trainer is as it was"


def test_a_failing_training_is_explained(hf, tmp_path, capfd):
    names = dict(vars(torch.Tensor))
    with pytest.raises(RuntimeError) as plain:
        hf.train(hf.bert("parameter"), tmp_path)
    callback = hf.GradsanCallback(json=str(tmp_path / "out.json"), language="en")
    with pytest.raises(RuntimeError) as caught:
        hf.train(hf.bert("parameter"), tmp_path, callback)
    assert str(caught.value) == str(plain.value)
    [note] = caught.value.__notes__
    assert "self.classifier.weight.mul_(0.5)" in note
    [diagnosis] = callback.report.diagnoses
    assert diagnosis.code in note
    assert diagnosis.tensor.name.endswith("classifier.weight")
    assert capfd.readouterr().err.count(f"error[{diagnosis.code}]") == 1
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert written["program"]["outcome"] == "failed"
    assert [one["code"] for one in written["diagnoses"]] == [diagnosis.code]
    assert dict(vars(torch.Tensor)) == names, "torch is as it was"


def test_an_error_in_the_forward(hf, tmp_path, capfd):
    callback = hf.GradsanCallback(language="en")
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        hf.train(hf.bert("leaf"), tmp_path, callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS301"]
    assert "GS301" in caught.value.__notes__[0]
    assert "error[GS301]" in capfd.readouterr().err


def test_a_silent_finding_is_reported_at_the_end(hf, tmp_path, capfd):
    callback = hf.GradsanCallback(language="en")
    hf.train(hf.bert("data"), tmp_path, callback)
    [diagnosis] = callback.report.diagnoses
    assert diagnosis.code == "GS202"
    err = capfd.readouterr().err
    assert "self.classifier.weight.data.mul_(0.5)" in err
    assert err.count("error[GS202]") == 1


def test_an_error_that_is_not_autograds_gets_nothing(hf, tmp_path, capfd):
    callback = hf.GradsanCallback()
    with pytest.raises(LookupError) as caught:
        hf.train(hf.bert("elsewhere"), tmp_path, callback)
    assert not hasattr(caught.value, "__notes__")
    assert callback.report.program.exception == ("LookupError", "not autograd's")
    assert "gradsan" not in capfd.readouterr().err


def test_a_step_of_the_users_own_is_left_in_place(hf, tmp_path):
    class Doubled(hf.Trainer):
        def training_step(self, *args, **kwargs):
            return 2 * super().training_step(*args, **kwargs)

    plain = hf.train(hf.bert(), tmp_path, trainer_class=Doubled)[1]
    trainer, losses = hf.train(hf.bert(), tmp_path, hf.GradsanCallback(), trainer_class=Doubled)
    assert losses == plain
    assert trainer.training_step.__func__ is Doubled.training_step


def test_a_training_ended_outside_of_its_steps_is_reported_with_the_next(hf, tmp_path, capfd):
    class Failing(hf.Trainer):
        def log(self, *args, **kwargs):
            super().log(*args, **kwargs)
            if self.state.global_step == 4:
                raise LookupError("a logger's")

    callback = hf.GradsanCallback(language="en")
    with pytest.raises(LookupError):
        hf.train(hf.bert("data"), tmp_path, callback, trainer_class=Failing)
    assert callback.report is None
    hf.train(hf.bert(), tmp_path, callback)
    assert capfd.readouterr().err.count("error[GS202]") == 1
    assert callback.report.diagnoses == ()


def test_the_origin_of_nan_is_found_in_a_training(hf, tmp_path):
    callback = hf.GradsanCallback("nonfinite", quiet=True)
    hf.train(hf.bert("root"), tmp_path, callback)
    (found,) = callback.report.diagnoses
    assert (found.code, found.nonfinite.op, found.nonfinite.round) == ("GS602", "sqrt", 2)
    assert [label.frame.function for label in found.labels if label.role == "origin"] == ["Bert.forward"]
