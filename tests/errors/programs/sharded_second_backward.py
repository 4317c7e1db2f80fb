import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
cpu = torch.device("cpu")
try:
    net = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), device_id=cpu)
    first, second = net(torch.ones(2, 4)).sum(), net(torch.rand(2, 4)).pow(2).sum()
    first.backward()
    second.backward()
finally:
    dist.destroy_process_group()
