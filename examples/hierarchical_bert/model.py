import torch.nn as nn
from transformers import BertConfig, BertModel

from data import FIELDS, LEAVES, VOCAB


class HierarchicalClassifier(nn.Module):
    """One BERT encoder, one head for the field and one for the topic."""

    def __init__(self, hidden_size=64, layers=2, heads=4, length=32):
        super().__init__()
        config = BertConfig(
            vocab_size=len(VOCAB),
            hidden_size=hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden_size,
            max_position_embeddings=length,
            pad_token_id=VOCAB["[PAD]"],
        )
        self.bert = BertModel(config)
        self.field_head = nn.Linear(hidden_size, len(FIELDS))
        self.topic_head = nn.Linear(hidden_size, len(LEAVES))

    def encode(self, input_ids, attention_mask):
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output

    def predict_field(self, input_ids, attention_mask):
        return self.field_head(self.encode(input_ids, attention_mask))

    def predict_topic(self, input_ids, attention_mask):
        return self.topic_head(self.encode(input_ids, attention_mask))
