"""A small BERT and a short training of it, for test_transformers.py, which imports this where it needs it."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from gradsan.integrations.transformers import GradsanCallback  # noqa: F401

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
