import native_kernels
import torch
from tools import normalize, rescale

state = torch.rand(16, requires_grad=True).exp()
loss = (state * state).sum()
normalize(state)
native_kernels.clamp(state.data_ptr(), 16)
rescale(state)
loss.backward()
