"""Learnt filters over Fourier modes, complex leaves, and a short-time transform."""

import torch
import torch.nn as nn

torch.manual_seed(25)


class Spec(nn.Module):
    def __init__(s, c, m):
        super().__init__()
        s.w = nn.Parameter(torch.randn(c, c, m, dtype=torch.cfloat) / c)
        s.m = m

    def forward(s, x):
        f = torch.fft.rfft(x)
        o = torch.zeros(*x.shape[:-1], x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        o[..., : s.m] = torch.einsum("bim,iom->bom", f[..., : s.m], s.w)
        return torch.fft.irfft(o, n=x.shape[-1])


net = nn.ModuleList([Spec(2, 4), nn.Conv1d(2, 2, 1)])
opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(4):
    x = torch.randn(3, 2, 16)
    l = (nn.functional.gelu(net[0](x) + net[1](x)) - x.roll(1, -1)).pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item(), net[0].w.grad.abs().sum().item())
z = torch.randn(4, dtype=torch.cdouble, requires_grad=True)
u = torch.exp(1j * z.angle())
(u.conj() * z).real.sum().backward()
print(z.grad.sum())
h = torch.view_as_real(z).pow(2).sum()
h.backward()
print(z.grad.sum())
p = torch.randn(256, requires_grad=True)
st = torch.stft(p, 64, 16, window=torch.hann_window(64), return_complex=True)
m = st.abs().clamp_min(1e-5).log()
m.mean().backward()
print(p.grad.sum().item())
