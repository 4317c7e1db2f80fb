"""While watching, functions of torch pickle, warn, ask subclasses and call from the same place as without gradsan."""

from __future__ import annotations

import collections
import copy as copying
import inspect
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsan
from gradsan.record import log

needs_native = pytest.mark.skipif(not log.native_available(), reason="C core not built")


class Warns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        for level in (1, 2, 3):
            warnings.warn("forward", stacklevel=level)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        warnings.warn("backward", stacklevel=2)
        return gradient * 2


class Groups(torch.optim.SGD):
    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)


class Rates(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        warnings.warn("rate", stacklevel=5)
        return [0.1 for _ in self.base_lrs]


class Asked(torch.Tensor):
    frames: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.frames.append(f"{function.__name__} {traceback.extract_stack(limit=2)[0].name}")
        return super().__torch_function__(function, types, args, kwargs or {})


def read_only() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


def twice() -> list[torch.Tensor]:
    return [torch.ones(1, requires_grad=True)] * 2


class Told(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(lambda *_: warnings.warn("state", stacklevel=3))
        self.register_load_state_dict_pre_hook(lambda *_: warnings.warn("load", stacklevel=4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in range(1, 9):
            warnings.warn("forward", stacklevel=level)
        return super().forward(x) / (0 if x.sum() < 0 else 1)


def checkpointed(sign: int, reentrant: bool) -> None:
    x = torch.full((1, 2), float(sign), requires_grad=True)
    checkpoint(Told() if sign > 0 else lambda _: 1 / 0, x, use_reentrant=reentrant).sum().backward()


def warned(tensor: torch.Tensor) -> torch.Tensor:
    for level in (1, 2, 3):
        warnings.warn("hook", stacklevel=level)
    return tensor


def fails(_: torch.Tensor) -> Any:
    raise KeyError("of the hook")


def hooked(pack: Any, unpack: Any, allowed: bool = True) -> None:
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    if allowed:
        with hooks:
            loss = (LEAF * LEAF).exp().sum()
        loss.backward()
    else:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"), hooks:
            pass
    assert (hooks.pack_hook, hooks.unpack_hook) == (pack, unpack)


LEAF = torch.ones(2, requires_grad=True)
CALLS: tuple[Callable[[], Any], ...] = (
    lambda: torch.from_numpy(read_only()),
    lambda: torch.as_tensor(read_only()),
    lambda: torch.asarray(read_only()),
    lambda: torch.frombuffer(b"1234", dtype=torch.int32),
    lambda: np.asarray(torch.ones(2)),
    lambda: torch.ones(2).data.copy_(torch.ones(2, dtype=torch.cfloat)),
    lambda: Warns.apply(LEAF).sum().backward(),
    lambda: Groups([LEAF], 0.1).add_param_group({"params": twice()}),
    lambda: torch.optim.SGD(twice(), 0.1),
    lambda: Rates(torch.optim.SGD([LEAF], 0.1)),
    lambda: setattr(torch.ones(2), "data", torch.ones(3)),
    lambda: nn.functional.batch_norm(torch.ones(1, 2), None, None, training=True),
    lambda: torch.ones(1, requires_grad=True).register_hook(),  # type: ignore[call-arg]
    lambda: torch.ones(1).register_hook(print),
    lambda: torch.from_numpy(3),
    lambda: LEAF.numpy(),
    lambda: setattr(LEAF, "data", 3),
    lambda: torch.ones(2).apply_(lambda number: 1 / 0),
    lambda: torch.optim.SGD([LEAF], 0.1).add_param_group(3),
    lambda: torch.optim.lr_scheduler.StepLR(3, 1),
    lambda: torch.ones(2).as_subclass(Asked).numpy(),
    lambda: torch.ones(2).as_subclass(Asked).data,
    lambda: setattr(torch.ones(2).as_subclass(Asked), "data", torch.ones(2)),
    lambda: torch.ones(2).as_subclass(Asked).set_(torch.ones(2)),
    lambda: torch.ones(2).as_subclass(Asked).data_ptr(),
    lambda: nn.Sequential(Told()).load_state_dict(nn.Sequential(Told()).state_dict()),
    lambda: Told().state_dict({}, "a."),
    lambda: Told().load_state_dict({}),
    lambda: Told().load_state_dict(3),  # type: ignore[arg-type]
    lambda: Told().state_dict(of="all"),  # type: ignore[call-overload]
    lambda: checkpointed(1, False),
    lambda: checkpointed(1, True),
    lambda: checkpointed(-1, False),
    lambda: checkpointed(-1, True),
    lambda: hooked(warned, warned),
    lambda: hooked(fails, warned),
    lambda: hooked(warned, fails),
    lambda: hooked(torch.clone, torch.neg),
    lambda: hooked(Mock(side_effect=warned), Mock(side_effect=warned)),
    lambda: hooked(1, warned),
    lambda: hooked(warned, warned, allowed=False),
)


def shown() -> list[Any]:
    """Each call's warnings with their places, the frames of its exception, and those that a subclass is asked from."""
    found = []
    torch.set_warn_always(True)
    for number, call in enumerate(CALLS):
        error = None
        Asked.frames.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
            except Exception as failure:
                frames = traceback.extract_tb(failure.__traceback__)
                error = type(failure).__name__, str(failure), [(one.filename, one.lineno) for one in frames]
        places = [(str(one.message), one.filename, one.lineno) for one in caught]
        found.append((number, places, error, tuple(Asked.frames)))
    torch.set_warn_always(False)
    return found


@needs_native
@pytest.mark.parametrize("mode", ["watch", "deep", "nonfinite"])
def test_warnings_and_tracebacks_are_from_the_same_places(mode: str) -> None:
    plain = shown()
    assert sum(len(places) for _, places, *_ in plain) > 10
    with gradsan.watch(mode):  # type: ignore[arg-type]
        assert shown() == plain
    assert shown() == plain


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.ones(3, 2)).square().sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    net.load_state_dict(net.state_dict())
    torch.from_numpy(net.weight.detach().numpy()).add_(1)
    LEAF.data.mul_(2)


@needs_native
def test_tracers_and_profilers_of_python_see_none_of_what_listens() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    package = str(Path(gradsan.__file__).parent)
    seen: collections.Counter[str] = collections.Counter()

    def trace(frame: Any, event: str, _: Any) -> Any:
        seen[frame.f_code.co_filename] += event == "call"
        return trace

    with gradsan.watch():
        for _ in range(4):  # the 1st, 2nd and 4th backward of a line are looked at
            sys.settrace(trace)
            step(net, optimizer)
            sys.settrace(None)
            sys.setprofile(trace)
            step(net, optimizer)
            sys.setprofile(None)
    assert sum(seen.values()) > 100
    assert sum(many for file, many in seen.items() if file.startswith(package)) <= 4 * 8, "the hooks of steps"


@needs_native
def test_functions_of_torch_are_taken_for_what_they_are() -> None:
    def looks() -> list[Any]:
        found = [torch.add, torch.relu_, torch.Tensor.add_, torch.from_numpy, torch.Tensor.numpy, nn.functional.relu]
        found += [nn.Module.state_dict, torch.optim.Optimizer.add_param_group, torch.Tensor.register_hook]
        kinds = types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType
        asked = inspect.isbuiltin, inspect.isfunction, inspect.isroutine, inspect.ismethoddescriptor, inspect.getdoc
        names = "__self__", "__code__", "__defaults__", "__wrapped__", "__text_signature__", "__module__"
        return [
            [
                one.__class__,
                [isinstance(one, kind) for kind in kinds],
                [ask(one) for ask in asked],
                [hasattr(one, name) for name in names],
                inspect.getsource(one) if inspect.isfunction(one) else None,
            ]
            for one in found
        ] + [len(inspect.getmembers(owner, inspect.isroutine)) for owner in (torch, torch.Tensor, nn.functional)]

    plain = looks()
    with gradsan.watch():
        assert looks() == plain
        torch.nn.functional.relu.tag = 1  # type: ignore[attr-defined]
    assert torch.nn.functional.relu.tag == 1  # type: ignore[attr-defined]
    del torch.nn.functional.relu.tag  # type: ignore[attr-defined]


def test_functions_of_torch_can_be_sent_to_other_processes() -> None:
    """As DataLoader's workers are sent ``collate_fn=torch.as_tensor``, and a saved module its activation."""

    def standing() -> list[Any]:
        builtins = ("add", "relu_", "from_numpy", "as_tensor", "frombuffer", "unsafe_chunk")
        methods = ("numpy", "set_", "apply_", "add_", "data_ptr", "register_hook", "__reduce_ex__")
        return [
            *(getattr(torch, name) for name in builtins),
            *(getattr(torch.Tensor, name) for name in methods),
            nn.functional.batch_norm,
            nn.functional.relu,
            nn.Module.state_dict,
            torch.optim.Optimizer.add_param_group,
        ]

    plain = [pickle.dumps(one) for one in standing()]
    with gradsan.watch():
        watched = standing()
        assert [pickle.dumps(one) for one in watched] == plain
        assert [pickle.loads(pickle.dumps(one)) == one for one in watched] == [True] * len(watched)
        for copied in (copying.copy, copying.deepcopy):
            assert [copied(one) is one for one in watched] == [True] * len(watched)


@needs_native
@pytest.mark.parametrize("mode", ["watch", "nonfinite"])
def test_a_program_may_use_up_its_depth_of_recursion(mode: str) -> None:
    def run(depth: int) -> None:
        if depth:
            return run(depth - 1)
        value = LEAF * 2
        value += 1
        return value.square().sum().backward()

    def outcomes() -> list[str]:
        found = []
        for depth in range(4, 64, 2):
            before, frame, above = sys.getrecursionlimit(), sys._getframe(), 0
            while frame is not None:
                frame, above = frame.f_back, above + 1  # type: ignore[assignment]
            try:
                sys.setrecursionlimit(above + 50)
                run(depth)
                found.append("ran")
            except RecursionError:
                found.append("too deep")
            finally:
                sys.setrecursionlimit(before)
        return found

    plain = outcomes().count("ran")
    assert 3 < plain < 30
    with gradsan.watch(mode):  # type: ignore[arg-type]
        assert plain - outcomes().count("ran") <= 2, "CPython 3.11 counts the calls of wrappers in C, too"


class Named(torch.Tensor):
    """A subclass whose own attributes have the names of torch's."""

    @property
    def is_leaf(self) -> Any:
        raise KeyError("the tree has no leaf")

    _version = requires_grad = grad_fn = output_nr = shape = property(lambda self: 1 / 0)  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["watch", "deep", "heal", "nonfinite"])
def test_a_subclass_may_have_attributes_of_any_name(mode: str) -> None:
    def gradient() -> Any:
        leaf = torch.arange(3.0, requires_grad=True)
        value = (leaf * 2).as_subclass(Named)
        (value * value).exp().as_subclass(torch.Tensor).sum().backward()
        return leaf.grad

    plain = gradient()
    with gradsan.watch(mode):  # type: ignore[arg-type]
        assert torch.equal(gradient(), plain)


def test_hooks_that_cannot_be_called_are_refused_where_they_are_given() -> None:
    def entered() -> str:
        with pytest.raises(TypeError) as caught:
            torch.autograd.graph.saved_tensors_hooks(1, 2).__enter__()  # type: ignore[arg-type]
        return str(caught.value)

    plain = entered()
    with gradsan.watch():
        assert entered() == plain
