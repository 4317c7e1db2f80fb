import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=True)
        return checkpoint(self.block, x, use_reentrant=True)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    net = DistributedDataParallel(Net(), find_unused_parameters=True)
    net(torch.ones(2, 4, requires_grad=True)).sum().backward()
finally:
    dist.destroy_process_group()
