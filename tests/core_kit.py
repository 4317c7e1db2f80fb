"""Helpers for the tests of the two cores: both cores, a program that writes, and comparable forms of their logs."""

import itertools
import sys
import types

import pytest
import torch

from gradsan.record import log

needs_native = pytest.mark.skipif(not log.native_available(), reason="the C core was not built for this Python")
CORES = [pytest.param(False, id="pure"), pytest.param(True, id="native", marks=needs_native)]


def constants(core):
    return sys.modules[type(core).__module__]


def plain(core, function):
    """``function`` wrapped for the Nodes it makes."""
    return core.writer(function, function.__name__, "plain", -1, None)


def places(stack):
    """The stack as (code, line and columns): within one call, a C callee and a Python callee see different offsets."""
    if not hasattr(types.CodeType, "co_positions"):
        return stack.codes
    return [
        (code, next(itertools.islice(code.co_positions(), lasti // 2, None)))
        for code, lasti in zip(stack.codes, stack.lastis, strict=True)
    ]


def install(core, patch):
    """Writers on torch.Tensor and torch, as capture puts them there."""
    for name in ("add_", "__iadd__", "zero_", "copy_"):
        patch.setattr(torch.Tensor, name, core.writer(getattr(torch.Tensor, name), name, "inplace", 0, None))
    setitem = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)
    patch.setattr(torch.Tensor, "__setitem__", setitem)
    patch.setattr(torch, "add", core.writer(torch.add, "add", "out", -1, "out"))
    patch.setattr(torch, "sort", core.writer(torch.sort, "sort", "out", -1, "out"))
    patch.setattr(torch, "relu_", core.writer(torch.relu_, "relu_", "inplace", 0, None))
    patch.setattr(torch, "_foreach_add_", core.writer(torch._foreach_add_, "_foreach_add_", "foreach", 0, None))
    core.active = True


def writing_program():
    tensor = torch.zeros(4, 3)
    tensor.add_(1)
    tensor += 1
    tensor[1:].add_(other=torch.ones(3))
    tensor[0] = 1
    tensor[1, ..., None, :2] = 2
    tensor[tensor > 1] = 3
    tensor[torch.tensor([0]), 1] = 3
    tensor[0:1, True] = 3
    tensor[::2] *= 3
    tensor.t().zero_()
    torch.add(tensor, 1)
    torch.add(tensor, 1, out=tensor)
    torch.add(tensor, 1, out=None)
    values, places = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.sort(tensor[0], out=(values, places))
    torch.relu_(input=tensor)
    torch._foreach_add_([tensor, values], 1)
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    with torch.no_grad():
        parameter.add_(1)
    (parameter * 1).zero_()
    sparse = torch.ones(2, 2).to_sparse()
    sparse.zero_()
    with torch.inference_mode():
        torch.ones(2).add_(1)
    torch.tensor(1.0).copy_(torch.tensor(2))
    torch.empty(0, 5).add_(1)
    return tensor.untyped_storage()._cdata
