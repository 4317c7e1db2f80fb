"""Classify abstracts in two levels with BERT: first the field, then, with the field's token in the text, the topic."""

import argparse
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from data import LABEL_TOKENS, VOCAB, Abstracts
from model import HierarchicalClassifier


@dataclass
class Config:
    epochs: int = 3
    texts: int = 384
    batch_size: int = 16
    lr: float = 1e-3
    seed: int = 0


def append_label(input_ids, attention_mask, field):
    """Put the field's label token behind the text, where the padding begins."""
    rows = torch.arange(len(input_ids))
    end = attention_mask.sum(dim=1)
    input_ids[rows, end] = LABEL_TOKENS[field]
    attention_mask[rows, end] = 1
    return input_ids, attention_mask


def training_step(model, batch):
    input_ids, attention_mask, field, topic = batch

    field_logits = model.predict_field(input_ids, attention_mask)
    field_loss = F.cross_entropy(field_logits, field)

    input_ids, attention_mask = append_label(input_ids, attention_mask, field_logits.argmax(dim=-1))
    topic_logits = model.predict_topic(input_ids, attention_mask)
    topic_loss = F.cross_entropy(topic_logits, topic)

    accuracy = (topic_logits.argmax(dim=-1) == topic).float().mean()
    return field_loss + topic_loss, accuracy.item()


def train(config):
    torch.manual_seed(config.seed)
    loader = DataLoader(Abstracts(config.texts, seed=config.seed), batch_size=config.batch_size, shuffle=True)
    model = HierarchicalClassifier().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(VOCAB)} tokens, {len(loader)} batches")

    for epoch in range(1, config.epochs + 1):
        total_loss, total_accuracy = 0.0, 0.0
        with tqdm(loader, desc=f"epoch {epoch}", leave=False) as bar:
            for batch in bar:
                loss, accuracy = training_step(model, batch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                total_loss += loss.item()
                total_accuracy += accuracy
                bar.set_postfix(loss=f"{loss.item():.3f}")
        n = len(loader)
        print(f"epoch {epoch}/{config.epochs}  loss {total_loss / n:.4f}  topic accuracy {total_accuracy / n:.1%}")


def parse_config():
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Config):
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(parse_config())
