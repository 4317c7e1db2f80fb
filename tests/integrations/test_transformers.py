"""Real trainings of a small BERT by the Trainer of transformers, with the callback and without."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gradsan.integrations.transformers import GradsanCallback

WORDS = 50


class Bert(BertForSequenceClassification):
    """``spoil`` is what goes wrong in the third forward."""

    spoil = "nothing"
    forwards = 0

    def forward(self, input_ids=None, labels=None):
        output = super().forward(input_ids=input_ids, labels=labels)
        self.forwards += 1
        if self.forwards == 3:
            if self.spoil == "parameter":
                with torch.no_grad():
                    self.classifier.weight.mul_(0.5)
            if self.spoil == "data":
                self.classifier.weight.data.mul_(0.5)
            if self.spoil == "leaf":
                self.classifier.weight.mul_(0.5)
            if self.spoil == "root":
                output.loss = output.loss + (output.logits * 0).sqrt().sum()
            if self.spoil == "elsewhere":
                raise LookupError("not autograd's")
        return output


def bert(spoil="nothing"):
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = Bert(BertConfig(vocab_size=WORDS, max_position_embeddings=16, num_labels=2, **size))
    model.spoil = spoil
    return model


def sentences():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (16, 8), generator=generator)
    # The Trainer drops what the signature of forward does not name: "number" would be one argument too many.
    return [{"input_ids": one, "labels": int(one[0] % 2), "number": number} for number, one in enumerate(ids)]


def train(model, folder, *callbacks, trainer_class=Trainer, **settings):
    """Train ``model`` for eight batches of two; the Trainer and what it logged of the loss."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **settings,
    )
    trainer = trainer_class(model=model, args=arguments, train_dataset=sentences(), callbacks=list(callbacks))
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
def test_a_right_training_is_the_same_with_it(settings, mode, tmp_path, capfd):
    plain, plain_losses = train(bert(), tmp_path, **settings)
    random = torch.random.get_rng_state()
    callback = GradsanCallback(mode)
    watched, losses = train(bert(), tmp_path, callback, **settings)
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


def test_a_failing_training_is_explained(tmp_path, capfd):
    names = dict(vars(torch.Tensor))
    with pytest.raises(RuntimeError) as plain:
        train(bert("parameter"), tmp_path)
    callback = GradsanCallback(json=str(tmp_path / "out.json"), language="en")
    with pytest.raises(RuntimeError) as caught:
        train(bert("parameter"), tmp_path, callback)
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


def test_an_error_in_the_forward(tmp_path, capfd):
    callback = GradsanCallback(language="en")
    with pytest.raises(RuntimeError, match="leaf Variable") as caught:
        train(bert("leaf"), tmp_path, callback)
    assert [one.code for one in callback.report.diagnoses] == ["GS301"]
    assert "GS301" in caught.value.__notes__[0]
    assert "error[GS301]" in capfd.readouterr().err


def test_a_silent_finding_is_reported_at_the_end(tmp_path, capfd):
    callback = GradsanCallback(language="en")
    train(bert("data"), tmp_path, callback)
    [diagnosis] = callback.report.diagnoses
    assert diagnosis.code == "GS202"
    err = capfd.readouterr().err
    assert "self.classifier.weight.data.mul_(0.5)" in err
    assert err.count("error[GS202]") == 1


def test_an_error_that_is_not_autograds_gets_nothing(tmp_path, capfd):
    callback = GradsanCallback()
    with pytest.raises(LookupError) as caught:
        train(bert("elsewhere"), tmp_path, callback)
    assert not hasattr(caught.value, "__notes__")
    assert callback.report.program.exception == ("LookupError", "not autograd's")
    assert "gradsan" not in capfd.readouterr().err


def test_a_step_of_the_users_own_is_left_in_place(tmp_path):
    class Doubled(Trainer):
        def training_step(self, *args, **kwargs):
            return 2 * super().training_step(*args, **kwargs)

    plain = train(bert(), tmp_path, trainer_class=Doubled)[1]
    trainer, losses = train(bert(), tmp_path, GradsanCallback(), trainer_class=Doubled)
    assert losses == plain
    assert trainer.training_step.__func__ is Doubled.training_step


def test_a_training_ended_outside_of_its_steps_is_reported_with_the_next(tmp_path, capfd):
    class Failing(Trainer):
        def log(self, *args, **kwargs):
            super().log(*args, **kwargs)
            if self.state.global_step == 4:
                raise LookupError("a logger's")

    callback = GradsanCallback(language="en")
    with pytest.raises(LookupError):
        train(bert("data"), tmp_path, callback, trainer_class=Failing)
    assert callback.report is None
    train(bert(), tmp_path, callback)
    assert capfd.readouterr().err.count("error[GS202]") == 1
    assert callback.report.diagnoses == ()


def test_the_origin_of_nan_is_found_in_a_training(tmp_path):
    callback = GradsanCallback("nonfinite", quiet=True)
    train(bert("root"), tmp_path, callback)
    (found,) = callback.report.diagnoses
    assert (found.code, found.nonfinite.op, found.nonfinite.round) == ("GS602", "sqrt", 2)
    assert [label.frame.function for label in found.labels if label.role == "origin"] == ["Bert.forward"]
