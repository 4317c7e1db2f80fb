import torch


@torch.library.custom_op("example::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x


same(torch.ones(3))
