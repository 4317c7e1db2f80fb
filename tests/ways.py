"""Every way of writing memory, counted by PyTorch or not, as functions of the tensor that is written.

A way is (what is made before the save, what is done after it); the first is None where nothing is. The tensor may be a
leaf, so what needs a tensor without a gradient takes ``detach()``; it may be on any device. ``SAVED`` are the kinds of
tensors that are written, :func:`run` runs a cell of the two tables.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

Way = tuple[Callable[[Any], Any] | None, Callable[[Any, Any], Any]]


def _after(write: Callable[[Any], Any]) -> Way:
    return None, lambda t, _: write(t)


def _alias(make: Callable[[Any], Any], write: Callable[[Any], Any] | None = None) -> dict[str, Way]:
    """One alias, made before the save and after it."""
    done = write or (lambda alias: alias.add_(1))
    return {"before": (make, lambda _, alias: done(alias)), "after": (None, lambda t, _: done(make(t)))}


def _quietly(write: Callable[[Any], Any]) -> Way:
    def no_grad(t: Any, _: Any) -> None:
        with torch.no_grad():
            write(t)

    return None, no_grad


def _in_a_thread(t: Any) -> None:
    def work() -> None:
        with torch.no_grad():
            t.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _in_inference_mode(t: Any) -> None:
    with torch.inference_mode():
        t.add_(1)


def _step(kind: str, **options: Any) -> Way:
    def step(t: Any) -> None:
        parameter = nn.Parameter(t.detach())
        parameter.grad = torch.ones_like(parameter)
        getattr(torch.optim, kind)([parameter], lr=0.1, **options).step()

    return _after(step)


def _loaded(t: Any) -> None:
    module = nn.Module()
    module.register_buffer("kept", t.detach())
    module.load_state_dict({"kept": torch.zeros_like(t)})


def _unscaled(t: Any) -> None:
    parameter = nn.Parameter(torch.zeros_like(t))
    parameter.grad = t.detach()
    scaler = torch.amp.GradScaler(t.device.type, init_scale=8.0)
    scaler.scale(torch.ones((), device=t.device))
    scaler.unscale_(torch.optim.SGD([parameter], lr=0.1))


def _normalised(t: Any) -> None:
    rows = torch.rand(5, 4).to(t.device)
    nn.functional.batch_norm(rows, t.detach(), _ones(t), training=True)


def _ones(like: Any) -> Any:
    return torch.ones(4, device=like.device)


def _set_item(target: Any) -> None:
    target[0] = 9.0


def _fill(target: Any) -> None:
    target.fill_(0)


def _fill_array(target: Any) -> None:
    target[...] = 7.0


def _by_pointer(t: Any) -> None:
    ctypes.memset(t.data_ptr(), 0, 8)


def _emptied_and_grown(t: Any) -> None:
    storage = t.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.fill_(0)


def _below_the_counter(t: Any) -> None:
    with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
        t.add_(1)


def _with_the_counter_kept(t: Any) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(t):
        t.add_(1)


def _redispatched(t: Any) -> None:
    kernels = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}.get(t.device.type, "PrivateUse1")
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kernels))
    torch.ops.aten.add_.Tensor.redispatch(keys, t.detach(), _ones(t))


def _add_one(target: Any) -> None:
    target.add_(1)


_library = torch.library.Library("gradsan_ways", "FRAGMENT")
_library.define("declared(Tensor(a!) x) -> ()")
_library.define("undeclared(Tensor x) -> ()")
_library.define("declared_raw(Tensor(a!) x) -> ()")
_library.impl("declared", _add_one, "CompositeExplicitAutograd")
_library.impl("undeclared", lambda x: _fill_array(x.numpy()), "CPU")
_library.impl("declared_raw", lambda x: _fill_array(x.numpy()), "CPU")


@torch.library.custom_op("gradsan_ways::honest", mutates_args={"x"})
def _honest(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("gradsan_ways::dishonest", mutates_args=())
def _dishonest(x: torch.Tensor) -> None:
    _fill_array(x.numpy())


_aliases = {
    "data": _alias(lambda t: t.data),
    "data, an element": _alias(lambda t: t.data, _set_item),
    "data, out=": _alias(lambda t: t.data, lambda alias: torch.add(_ones(alias), 5, out=alias)),
    "a Parameter of data": _alias(lambda t: nn.Parameter(t.data, requires_grad=False)),
    "numpy": _alias(lambda t: t.detach().numpy(), _fill_array),
    "numpy.asarray": _alias(lambda t: numpy.asarray(t.detach()), _fill_array),
    "memoryview": _alias(lambda t: memoryview(t.detach().numpy()), _set_item),
    "a ufunc with out=": _alias(lambda t: t.detach().numpy(), lambda array: numpy.exp(array, out=array)),
    "from_numpy": _alias(lambda t: torch.from_numpy(t.detach().numpy())),
    "dlpack": _alias(lambda t: torch.from_dlpack(t.detach())),
    "dlpack to numpy": _alias(lambda t: numpy.from_dlpack(t.detach()), lambda array: _fill_array(array.view())),
    "copy.copy": _alias(lambda t: copy.copy(t.detach())),
    "set_ of the storage": _alias(lambda t: t.new_empty(0).set_(t.detach().untyped_storage(), 0, (4,))),
    "set_ of the tensor": _alias(lambda t: t.new_empty(0).set_(t.detach())),
    "unsafe_chunk": _alias(lambda t: t.detach().unsafe_chunk(2)[0]),
    "unsafe_split": _alias(lambda t: torch.unsafe_split(t.detach(), 2)[0]),
    "unsafe_split_with_sizes": _alias(lambda t: torch.unsafe_split_with_sizes(t.detach(), [2, 2])[0]),
    "_unsafe_view": _alias(lambda t: torch.ops.aten._unsafe_view(t.detach(), [2, 2])),
    "an untyped storage": _alias(lambda t: t.untyped_storage(), _fill),
    "an untyped storage, an element": _alias(lambda t: t.untyped_storage(), lambda storage: storage.__setitem__(2, 9)),
    "a typed storage": _alias(lambda t: t.storage(), _fill),
    "detach": _alias(lambda t: t.detach()),
    "a slice": _alias(lambda t: t.detach()[1:]),
    "other bits": _alias(lambda t: t.detach().view(torch.int32)),
}

WAYS: dict[str, Way] = {
    f"{name}, made {when} the save": way for name, both in _aliases.items() for when, way in both.items()
} | {
    "nothing": _after(lambda t: None),
    "data, read only": _after(lambda t: t.data.sum()),
    "numpy, read only": _after(lambda t: t.detach().numpy().sum()),
    "add_ under no_grad": _quietly(lambda t: t.add_(1)),
    "+= of a slice": _quietly(lambda t: t[:2].__iadd__(1)),
    "add_(0)": _quietly(lambda t: t.add_(0)),
    "inference_mode": _after(_in_inference_mode),
    "another thread": _after(_in_a_thread),
    "out=": _quietly(lambda t: torch.add(t, 1, out=t)),
    "_foreach_add_": _quietly(lambda t: torch._foreach_add_([torch.zeros(1, device=t.device), t], 1.0)),
    "torch.ops": _quietly(lambda t: torch.ops.aten.add_.Tensor(t, _ones(t))),
    "vmap": _quietly(lambda t: torch.vmap(lambda row: row.add_(1))(t.detach().view(2, 2))),
    "load_state_dict": _after(_loaded),
    "nn.init": _after(lambda t: nn.init.zeros_(t)),
    "SGD": _step("SGD", foreach=False),
    "Adam, foreach": _step("Adam", foreach=True),
    "SGD, fused": _step("SGD", fused=True),
    "Adam, fused": _step("Adam", fused=True),
    "AdamW, fused": _step("AdamW", fused=True),
    "Adagrad, fused": _step("Adagrad", fused=True),
    "GradScaler.unscale_": _after(_unscaled),
    "set_data": _after(lambda t: setattr(t, "data", torch.full((4,), 7.0, device=t.device))),
    "data written with itself": _after(lambda t: t.data.copy_(t.data.clone())),
    "set_ of the tensor itself": _quietly(lambda t: t.detach().set_(torch.zeros(4, device=t.device))),
    "apply_": _after(lambda t: t.detach().apply_(lambda value: value + 1)),
    "map_": _after(lambda t: t.detach().map_(_ones(t), lambda value, other: value + other)),
    "a pointer": _after(_by_pointer),
    "a storage emptied and grown again": _after(_emptied_and_grown),
    "an operator with (a!) on aten": _after(lambda t: torch.ops.gradsan_ways.declared(t.detach())),
    "an operator with (a!) on memory": _after(lambda t: torch.ops.gradsan_ways.declared_raw(t.detach())),
    "an operator that declares nothing": _after(lambda t: torch.ops.gradsan_ways.undeclared(t.detach())),
    "custom_op with mutates_args": _after(lambda t: _honest(t.detach())),
    "custom_op without mutates_args": _after(lambda t: _dishonest(t.detach())),
    "below ADInplaceOrView": _after(_below_the_counter),
    "_unsafe_preserve_version_counter": _after(_with_the_counter_kept),
    "redispatch": _after(_redispatched),
}


def _rising(device: str) -> Any:
    return torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True, device=device)


def _input(device: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    x = _rising(device)
    return x, x * 2, lambda t: (t * t).sum()


def _output(device: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    x = _rising(device)
    return x, x.exp(), lambda t: t.sum()


def _leaf(device: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    x = _rising(device)
    return x, x, lambda t: (t * t).sum()


def _buffer(device: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    x = _rising(device)
    return x, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device), lambda t: (x * t).sum()


def _view(device: str) -> tuple[Any, Any, Callable[[Any], Any]]:
    x = _rising(device)
    return x, x * 2, lambda t: (t[:3] * t[:3]).sum()


SAVED = {"input": _input, "output": _output, "leaf": _leaf, "buffer": _buffer, "view": _view}


def run(saved: str, way: str | None, device: str = "cpu") -> tuple[Any, str | None]:
    """The gradient, or what PyTorch said instead; of a cell without a ``way`` nothing is written."""
    x, t, loss_of = SAVED[saved](device)
    before, write = WAYS[way] if way is not None else WAYS["nothing"]
    alias = before(t) if before is not None else None
    loss = loss_of(t)
    write(t, alias)
    try:
        loss.backward()
    except RuntimeError as error:
        return None, str(error).partition(":")[0]
    return x.grad, None


def verdict(diagnoses: tuple[Any, ...]) -> str:
    """What gradsan has said of a cell: backward ``raises``, or its gradient is ``wrong`` or ``right``."""
    errors = [one for one in diagnoses if one.severity == "error"]
    if any(one.gradient.status == "raised" for one in errors):
        return "raises"
    return "wrong" if errors else "right"
