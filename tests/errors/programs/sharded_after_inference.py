import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
torch.manual_seed(0)
cpu = torch.device("cpu")
try:
    net = FullyShardedDataParallel(nn.Linear(4, 4), device_id=cpu, use_orig_params=True)
    with torch.inference_mode():
        before = net(torch.ones(2, 4))
    net(torch.ones(2, 4)).sum().backward()
finally:
    dist.destroy_process_group()
