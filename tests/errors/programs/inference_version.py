import torch

with torch.inference_mode():
    prompt = torch.ones(3)
print(prompt._version)
