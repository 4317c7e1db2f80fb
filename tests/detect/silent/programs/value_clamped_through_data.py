import torch

x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
probs = torch.softmax(x, dim=0) * 1
probs.data[probs.data < 0.2] = 0.2
(probs / probs.sum()).log().sum().backward()
