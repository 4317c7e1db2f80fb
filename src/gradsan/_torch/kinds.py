"""Kinds of tensors: by dispatch keys, wrapper subclasses and their inner tensors; the tensors in containers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from gradsan._torch.modes import PLAIN_TENSORS

_DISPATCHED_BY_TORCH = ("torch.distributed.", "torch.nested.", "torch._subclasses.", "torch.sparse.", "torch.masked.")
_CLASSES_READ = 500


def inner_tensors(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """Return (name, tensor) of the tensors in which a wrapper subclass holds its values; empty for other tensors.

    A class lists them by ``__tensor_flatten__``, which torch.compile calls, too. Without it, the only tensor among
    the attributes is taken; where there are several, some may be no part of the value, so none is. Torch's own
    wrappers (DTensor, nested tensors) do not allow access to their inner tensors, and are left out.
    """
    kind = type(tensor)
    if kind in PLAIN_TENSORS or not _is_wrapper(kind):
        return ()
    if hasattr(kind, "__tensor_flatten__"):
        try:
            names, _ = cast("Any", tensor).__tensor_flatten__()
            held = [(name, getattr(tensor, name)) for name in names]
        except Exception:
            return ()  # the program's own code, which only gradsan has called
    else:
        held = [(name, one) for name, one in _attributes(tensor) if torch.is_tensor(one)]
        held = held if len(held) == 1 else []
    return tuple((name, one) for name, one in held if torch.is_tensor(one))


def _attributes(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield from vars(tensor).items()
    for kind in type(tensor).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(tensor, name):
                yield name, getattr(tensor, name)


def has_wrapper_classes() -> bool:
    """Whether the program has loaded a wrapper subclass that is not torch's own."""
    waiting, seen = list(torch.Tensor.__subclasses__()), 0
    while waiting and seen < _CLASSES_READ:
        kind = waiting.pop()
        seen += 1
        if _is_wrapper(kind) and not kind.__module__.startswith("torch."):
            return True
        waiting += kind.__subclasses__()
    return False


def dispatches(kind: type) -> bool:
    """Whether a tensor class has a ``__torch_dispatch__`` of its own."""
    if kind in PLAIN_TENSORS:
        return False
    own = getattr(kind, "__torch_dispatch__", None)
    return own is not None and getattr(own, "__func__", own) is not _NO_DISPATCH


_NO_DISPATCH = getattr(torch._C, "_disabled_torch_dispatch_impl", None)


def _is_wrapper(kind: type) -> bool:
    return dispatches(kind) and not kind.__module__.startswith(_DISPATCHED_BY_TORCH)


_keys_of: Callable[[Any], Any] | None = getattr(torch._C, "_dispatch_keys", None)

# Keys of tensors in ordinary memory, including bits and bookkeeping that do not change that.
_ORDINARY = ("Autograd", "Autocast", "ADInplaceOrView", "Conjugate", "Negative", "Dense")
_DEVICES = ("CPU", "CUDA", "HIP", "XPU", "MPS", "HPU", "MTIA", "MAIA", "IPU", "VE", "PrivateUse")

_known: dict[int, bool] = {}


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in ordinary memory, where they can be copied and compared.

    They do not where its class dispatches (subclasses, fake tensors), where a transform wraps it (``vmap``,
    functionalization), and where it is sparse, nested, quantized, of zeros without memory, or on ``meta``. Missing: by
    class and layout.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if _keys_of is None:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        return bool(is_dense and tensor.device.type != "meta")
    keys = _keys_of(tensor)
    number = int(keys.raw_repr())
    known = _known.get(number)
    if known is None:
        known = _known[number] = _is_ordinary(str(keys))
    return known


def _is_ordinary(keys: str) -> bool:
    """Whether all of ``keys`` are ordinary; their form is ``DispatchKeySet(CPU, ADInplaceOrView, AutogradCPU)``."""
    names = keys.partition("(")[2].rstrip(")").replace(" ", "").split(",")
    return all(name.startswith((*_DEVICES, *_ORDINARY)) for name in names) and not any("Nested" in one for one in names)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values at all: those on ``meta`` and those used only for tracing have none."""
    return has_elements(tensor) or (
        tensor.device.type != "meta" and kind_of(tensor) not in ("FakeTensor", "FunctionalTensor", "Functionalize")
    )


def kind_of(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor that fails :func:`has_elements`, in PyTorch's word: a class, a layout, ``meta`` …"""
    if tensor.device.type == "meta":
        return "meta"
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return type(tensor).__qualname__
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").strip("_")
    if tensor.is_quantized:
        return "quantized"
    names = "" if _keys_of is None else str(_keys_of(tensor)).partition("(")[2].rstrip(")")
    return ", ".join(name for name in names.split(", ") if not _is_ordinary(f"({name})"))


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; empty for a nested one, whose parts have a shape each."""
    return () if tensor.is_nested and tensor.layout is torch.strided else tuple(tensor.shape)


def facts_of(tensor: torch.Tensor) -> dict[str, object]:
    """Return ``shape``, ``dtype`` and ``device`` in the form of a clue's values."""
    return {"shape": shape_of(tensor), "dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}


def sizes_of(tensor: torch.Tensor) -> str:
    """Return the sizes of a tensor as in PyTorch's errors; for a nested one those of all its parts."""
    if not tensor.is_nested or tensor.layout is not torch.strided:
        return str(list(tensor.shape))
    sizes = tensor._nested_tensor_size()
    rows = sizes.tolist()
    width = max((len(str(size)) for row in rows for size in row), default=0) + 1
    lines = [" ".join(f"{size:>{width}}" for size in row) for row in rows]
    return "\n".join([*lines, f"[ {sizes.type()}{{{','.join(map(str, sizes.shape))}}} ]"])


def type_of(tensor: torch.Tensor) -> str:
    """Return the type of a tensor as in PyTorch's errors."""
    name = str(tensor.type())
    return f"Meta{name.rpartition('.')[2].removesuffix('Tensor')}Type" if tensor.device.type == "meta" else name


def tensors_in(
    value: Any, depth: int = 3, most: int | None = None, *, in_objects: bool = False
) -> Iterator[torch.Tensor]:
    """Yield the tensors in an argument or a result: itself, or in the first ``most`` items of tuples, lists and dicts.

    ``depth`` bounds the nesting of containers. With ``in_objects``, tensors in attributes of other objects are
    included.
    """
    if torch.is_tensor(value):
        yield value
    elif depth and isinstance(value, tuple | list | dict):
        items = value.values() if isinstance(value, dict) else value
        for item in itertools.islice(items, most):
            yield from tensors_in(item, depth - 1, most, in_objects=in_objects)
    elif depth and in_objects and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from filter(torch.is_tensor, list(vars(value).values()))


def tensors_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a call, and one level into tuples, lists and dicts among them."""
    found: list[torch.Tensor] = []
    for one in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, tuple | list | dict):
            found += tensors_in(one, 1)
    return found


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of the elements as memory has them: without a lazy ``conj`` or negation."""
    stored = tensor.detach()
    stored = stored.conj() if stored.is_conj() else stored
    return torch._neg_view(stored) if stored.is_neg() else stored
