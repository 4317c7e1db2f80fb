import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with FullyShardedDataParallel.summon_full_params(net):
            norm = self.inner.weight.norm()
        return self.inner(x) / norm


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
cpu = torch.device("cpu")
try:
    net = FullyShardedDataParallel(Net(), device_id=cpu, use_orig_params=True)
    net(torch.ones(2, 4)).sum().backward()
finally:
    dist.destroy_process_group()
