import torch.nn as nn
import torch.nn.functional as F


class LinearClassifier(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.fc = nn.Linear(3 * 32 * 32, num_classes)

    def forward(self, images):
        return self.fc(images.flatten(1))


class SmallCNN(nn.Module):
    def __init__(self, num_classes=10, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc = nn.Linear(2 * width * 8 * 8, num_classes)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.conv1(images), inplace=True), 2)
        x = F.max_pool2d(F.relu(self.conv2(x), inplace=True), 2)
        return self.fc(x.flatten(1))


MODELS = {"linear": LinearClassifier, "cnn": SmallCNN}
