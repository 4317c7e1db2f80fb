import torch

with torch.inference_mode():
    prompt = torch.ones(3)
prompt.requires_grad_()
