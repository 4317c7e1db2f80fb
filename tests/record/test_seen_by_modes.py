"""The program's modes, tracers and subclasses see only the program's calls: watching calls no operator there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, jacrev, vmap
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import core_kit
import gradsan
from cases import each

seen: list[str] = []


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """Is asked for its sizes as for any operator."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        how = {"dtype": inner.dtype, "device": inner.device, "dispatch_sizes_strides_policy": "sizes"}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **how)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        args, kwargs = tree_map(lambda one: one.inner if isinstance(one, Wrapper) else one, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map(lambda one: Wrapper(one) if isinstance(one, torch.Tensor) else one, out)


def trained(x: Any) -> None:
    y = x * 2
    y.mul_(3)
    y[0] = 1
    torch.add(torch.ones(3), 1, out=torch.empty(3))
    (y.exp().sum() + y[1:].sin().sum()).backward()


def in_a_dispatch_mode() -> None:
    with Dispatched():
        trained(torch.ones(3, requires_grad=True))


def in_a_function_mode() -> None:
    with Called():
        trained(torch.ones(3, requires_grad=True))


class Asked:
    """Takes part in no operation, and is asked about each."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func


OVERRIDABLE = {id(function) for function in get_testing_overrides()}
OPERATIONS = [
    (owner, name)
    for owner in (torch, torch.functional, torch.nn.functional, torch.Tensor)
    for name in dir(owner)
    if id(getattr(owner, name)) in OVERRIDABLE
]


def told_by_identity() -> None:
    """``func is torch.add``, for each function and method that asks when it is given as many arguments as it takes."""
    for owner, name in OPERATIONS:
        function = getattr(owner, name)
        for count in range(1, 5):
            try:
                given = function(*[Asked()] * count)
            except Exception:
                continue
            seen.append(f"{owner.__name__}.{name}: {given is function} {given == function}")
            break
    for node in symbolic_trace(lambda x: torch.add(torch.relu(x), 1).abs() ** 2).graph.nodes:
        seen.append(f"{node.target is torch.relu} {node.target is torch.add}")


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def memory_of_a_subclass() -> None:
    x = torch.ones(3).as_subclass(Named)
    x.data = torch.zeros(3)
    (x.data, x.numpy(), x.set_(torch.ones(2)), x.unsafe_chunk(2), x.resize_(4), x.requires_grad_())
    (x * x.detach()).sum().backward()


def handed_out_in_a_function_mode() -> None:
    x = torch.ones(3)
    with Called():
        x.resize_(5)
        x.set_(torch.ones(2))
        x.resize_as_(torch.ones(3))
        x.untyped_storage().resize_(40)
        x.data = x.data.clone()
        (x.numpy(), x.__array__(), x.data_ptr(), x.view(-1), torch.from_dlpack(x), x.share_memory_())
    with FakeTensorMode():
        torch.ones(3).resize_(4).untyped_storage().resize_(0)


def without_data() -> None:
    with Dispatched():
        trained(torch.ones(3, device="meta", requires_grad=True))


def of_a_wrapper() -> None:
    x = Wrapper(torch.ones(3)).requires_grad_()
    with torch.no_grad():
        x.mul_(2)
        torch.add(x, 1, out=x)
    seen.append(str(x._version))


def sparse_in_a_mode() -> None:
    x = torch.ones(3, 3).to_sparse().requires_grad_()
    with Dispatched():
        x.detach().clone().zero_()
        torch.sparse.mm(x, torch.ones(3, 3, requires_grad=True)).sum().backward()


def sparse_under_the_profiler() -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(3, 3).to_sparse().zero_()
    seen.extend(f"{event.key}: {event.count}" for event in profiler.key_averages())


def loss_under_the_profiler() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.profiler.profile() as profiler:
        (x * x).sum().backward()
    seen.extend(f"{event.key}: {event.count}" for event in profiler.key_averages())


def nested() -> None:
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        with Dispatched():
            (x * 2).mul_(2)


def written_within(x: Any) -> Any:
    y = x.clone()
    y.mul_(2)
    y[0] = 1
    return (y * x).sum()


def traced() -> None:
    def function(x: Any) -> Any:
        return (x**3).sum() * x.sin()

    graph = make_fx(jacrev(jacrev(function)))(torch.ones(2))
    seen.extend([graph.code, str(graph(torch.ones(2)))])
    for mode in ("real", "fake", "symbolic"):
        for transformed in (written_within, functionalize(grad(written_within)), grad(written_within)):
            seen.append(make_fx(transformed, tracing_mode=mode)(torch.ones(3)).code)
    seen.append(make_fx(vmap(grad(written_within)))(torch.ones(2, 3)).code)
    seen.append(re.sub(" # .*", "", str(torch.jit.trace(lambda x: x.clone().mul_(2).sin(), torch.ones(3)).graph)))


def loss_of_a_wrapper() -> None:
    x = Wrapper(torch.ones(())).requires_grad_()
    x.exp().backward()


PROGRAMS = [
    told_by_identity,
    in_a_dispatch_mode,
    in_a_function_mode,
    without_data,
    of_a_wrapper,
    sparse_in_a_mode,
    sparse_under_the_profiler,
    loss_under_the_profiler,
    nested,
    traced,
]


def saw(program: Callable[[], None]) -> list[str]:
    seen.clear()
    program()
    return list(seen)


@pytest.mark.filterwarnings("error:Accessing the data pointer")
@pytest.mark.parametrize("mode", ["watch", "deep", "heal", "nonfinite"])
@each("program", [in_a_function_mode, handed_out_in_a_function_mode, memory_of_a_subclass, loss_of_a_wrapper])
def test_no_mode_of_gradsan_asks_what_the_program_did_not(program: Callable[[], None], mode: Any) -> None:
    saw(program)
    # A slot with hooks is read by PyTorch's own detach.
    plain = [one for one in saw(program) if "detach" not in one]
    with gradsan.watch(mode):
        assert [one for one in saw(program) if "detach" not in one] == plain


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("native", core_kit.CORES)
@each("program", PROGRAMS)
def test_the_program_sees_what_it_does_alone(program: Callable[[], None], native: bool) -> None:
    saw(program)  # what runs once only
    plain = saw(program)
    with gradsan.watch(native=native) as watched:
        assert saw(program) == plain
    assert plain
    assert not watched.report.diagnoses
