import torch
from torch import nn
import torch.nn.functional as F


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def train_epoch(self, loader):
        self.model.train()
        running = 0.0
        for i, (images, labels) in enumerate(loader):
            self.optimizer.zero_grad()
            logits = self.model(images)
            loss = self.criterion(logits, labels)
            loss.backward()
            self.optimizer.step()
            running += loss.item()
        return running / len(loader)
