"""Made-up abstracts with a field and a topic, already tokenised: no download, the same for the same seed."""

import torch
from torch.utils.data import Dataset

TOPICS = {
    "physics": {
        "optics": "laser photon lens interference spectrum cavity",
        "mechanics": "force momentum friction pendulum torque collision",
    },
    "biology": {
        "genetics": "gene allele mutation genome heredity sequence",
        "ecology": "habitat predator forest species biomass climate",
    },
    "computing": {
        "networks": "packet router latency protocol bandwidth congestion",
        "databases": "query index transaction schema join storage",
    },
}
FIELD_WORDS = {
    "physics": "energy field particle wave",
    "biology": "cell organism population evolution",
    "computing": "software algorithm memory system",
}
COMMON = "we show that the result of this study is a new method for large and small cases with better".split()

FIELDS = list(TOPICS)
LEAVES = [(field, topic) for field in FIELDS for topic in TOPICS[field]]

SPECIAL = ["[PAD]", "[CLS]", "[SEP]"]
LABELS = [f"[{field}]" for field in FIELDS]
WORDS = sorted({w for topics in TOPICS.values() for ws in topics.values() for w in ws.split()})
VOCAB = {w: i for i, w in enumerate([*SPECIAL, *LABELS, *COMMON, *" ".join(FIELD_WORDS.values()).split(), *WORDS])}

LABEL_TOKENS = torch.tensor([VOCAB[label] for label in LABELS])


class Abstracts(Dataset):
    """Items are input_ids and attention_mask (int64, (length,)), field (0-2) and topic (0-5).

    A text is ``[CLS] w1 w2 ... [SEP] [PAD] ... [PAD]``: its last place is always free.
    """

    def __init__(self, n, length=32, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def pick(words):
            return words[int(torch.randint(len(words), (), generator=generator))]

        self.items = []
        for _ in range(n):
            topic = int(torch.randint(len(LEAVES), (), generator=generator))
            field_name, topic_name = LEAVES[topic]
            sources = [COMMON, COMMON, FIELD_WORDS[field_name].split(), TOPICS[field_name][topic_name].split()]
            words = [pick(pick(sources)) for _ in range(int(torch.randint(10, length - 3, (), generator=generator)))]
            tokens = [VOCAB[w] for w in ["[CLS]", *words, "[SEP]"]]
            input_ids = torch.full((length,), VOCAB["[PAD]"])
            input_ids[: len(tokens)] = torch.tensor(tokens)
            attention_mask = (torch.arange(length) < len(tokens)).long()
            self.items.append((input_ids, attention_mask, FIELDS.index(field_name), topic))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]
