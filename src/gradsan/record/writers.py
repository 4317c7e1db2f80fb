"""Functions of torch that write to a tensor, read from the dispatcher's schemas."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, MappingProxyType
from typing import Any

import torch

from gradsan import _torch

# Schemas that mark an argument as written although no element of it changes (facts: retain_grad and record_stream
# carry ``(a!)`` for ordering only; the rest set flags or names).
WRITES_NO_DATA = frozenset(
    {"record_stream", "rename_", "requires_grad_", "retain_grad", "_coalesced_", "_sobol_engine_initialize_state_"}
)

# In-place operations on shape and strides: they move the version counter, and change no byte.
METADATA_ONLY = frozenset(
    {*("as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")}
)

# Attributes of torch.Tensor that are no aten operators but write: Python's in-place operators and item assignment.
IN_PLACE_OPERATORS = tuple(
    sorted(
        name
        for name in dir(operator)
        if name.startswith("__i") and hasattr(torch.Tensor, name) and name not in {"__index__", "__inv__", "__invert__"}
    )
)

_TENSOR_TYPES = ("Tensor", "Optional[Tensor]", "List[Tensor]", "Optional[List[Tensor]]", "List[Optional[Tensor]]")


@dataclass(frozen=True, slots=True)
class Writer:
    """A Python name that writes: ``positions`` of written positional arguments, name of the written ``keyword``."""

    op: str
    positions: tuple[int, ...] = ()
    keyword: str | None = None

    @property
    def kind(self) -> str:
        """The :data:`gradsan.model.WriteKind` of its writes."""
        if self.op == "__setitem__":
            return "setitem"
        if self.op in METADATA_ONLY:
            return "metadata"
        if self.op.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
            return "foreach"
        return "out" if self.keyword and not self.positions else "inplace"


def mutable_schemas(schemas: Iterable[Any] | None = None) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """Yield (namespace, name, written positions, has written keywords) of ``schemas`` that write (None: of all)."""
    for schema in _torch.all_schemas() if schemas is None else schemas:
        if not schema.is_mutable:
            continue
        positions = []
        keyword = False
        for position, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write or str(argument.type) not in _TENSOR_TYPES:
                continue
            if schema.overload_name == "Tensor" and str(argument.type) == "List[Tensor]":
                continue  # TorchScript's own list methods (list.sort), which have no tensor binding
            if argument.kwarg_only:
                keyword = True
            else:
                positions.append(position)
        if positions or keyword:
            namespace, _, name = schema.name.partition("::")
            # An ``.out`` overload may list its outputs as positional in the schema; Python always spells them ``out=``.
            if "out" in schema.overload_name and positions and not name.endswith("_"):
                last = [p for p in positions if schema.arguments[p].name.startswith("out")]
                positions = [p for p in positions if p not in last]
                keyword = keyword or bool(last)
            yield namespace, name, tuple(positions), keyword


@functools.lru_cache(maxsize=1)
def _read() -> tuple[Mapping[str, Writer], frozenset[str]]:
    """Return writers and names that return tensors; cached, as torch makes thousands of schema objects."""
    schemas = _torch.all_schemas()
    return _writers(schemas), _returning_tensors(schemas)


def aten_writers() -> Mapping[str, Writer]:
    """Return every aten operator that writes, by name, with the arguments that its Python binding writes."""
    return _read()[0]


def _writers(schemas: Iterable[Any]) -> Mapping[str, Writer]:
    positions: dict[str, set[int]] = {}
    keywords: set[str] = set()
    for namespace, name, where, keyword in mutable_schemas(schemas):
        if namespace != "aten" or name in WRITES_NO_DATA:
            continue
        positions.setdefault(name, set()).update(where)
        if keyword:
            keywords.add(name)
    return MappingProxyType(
        {
            name: Writer(name, tuple(sorted(where)), "out" if name in keywords else None)
            for name, where in positions.items()
        }
    )


def tensor_methods() -> Iterator[Writer]:
    """Yield the methods and operators of ``torch.Tensor`` that write."""
    for name, writer in aten_writers().items():
        if 0 in writer.positions and hasattr(torch.Tensor, name):
            yield Writer(name, (0,))
    for name in IN_PLACE_OPERATORS:
        yield Writer(name, (0,))
    yield Writer("__setitem__", (0,))


def functions() -> Iterator[tuple[Any, str, Any, Writer]]:
    """Yield (namespace, attribute, function, Writer) of every function that writes, under each of its names."""
    writers = aten_writers()
    originals: dict[int, Writer] = {}
    namespaces = _torch.function_namespaces()
    attributes = [vars(namespace) for namespace in namespaces]
    for name, writer in writers.items():
        for function in (_torch.variable_function(name), *(one[name] for one in attributes if name in one)):
            if function is not None and callable(function):
                originals[id(function)] = writer
    for namespace in namespaces:
        for attribute, value in list(vars(namespace).items()):
            known = originals.get(id(value))
            if known is not None:
                yield namespace, attribute, value, known
    for name, writer in writers.items():
        function = _torch.variable_function(name)
        if function is not None and name not in vars(_torch.vf_module()):
            yield _torch.vf_module(), name, function, writer


def operations(writing: Iterable[tuple[Any, str, Any, Writer]]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (namespace, attribute, function) that may make autograd Nodes without writing; only their stacks matter.

    ``writing`` is the result of :func:`functions`.

    These are the methods and operators of ``torch.Tensor`` and the builtin functions of torch's namespaces whose aten
    operator returns a tensor. Those that write are in :func:`tensor_methods` and :func:`functions`. ``__getitem__`` is
    not among them: set as an attribute, it would make every tensor a sequence (:mod:`gradsan.record.patches`).
    The native core replaces the C slot alone (``watch_indexing``); the pure one does not log indexing.
    """
    methods = {writer.op for writer in tensor_methods()}
    names = _read()[1]
    for name in dir(torch.Tensor):
        is_operator = name.startswith("__") and name.strip("_").removeprefix("r") in _OPERATORS
        if name in methods or not (is_operator or name in names):
            continue
        function = getattr(torch.Tensor, name)
        if callable(function) and name not in MAKES_NO_NODES:
            yield torch.Tensor, name, function
    seen = {(id(namespace), attribute) for namespace, attribute, _, _ in writing}
    for namespace in _torch.function_namespaces():
        for attribute, value in list(vars(namespace).items()):
            if (
                isinstance(value, BuiltinFunctionType)
                and value.__name__ in names
                and (id(namespace), attribute) not in seen
            ):
                yield namespace, attribute, value
    vf = _torch.vf_module()
    for name in names:
        function = _torch.variable_function(name)
        if function is not None and (id(vf), name) not in seen:
            yield vf, name, function


# Methods that return a tensor and never make a Node that saves one; some are called very often.
MAKES_NO_NODES = frozenset({"detach", "data", "cpu", "cuda", "to", "requires_grad_", "grad", "new_empty", "new_zeros"})

_OPERATORS = frozenset(
    {
        *("abs", "add", "and", "div", "eq", "floordiv", "ge", "gt", "invert", "le", "lt", "matmul", "mod"),
        *("mul", "ne", "neg", "or", "pos", "pow", "sub", "truediv", "xor"),
    }
)


def _returning_tensors(schemas: Iterable[Any]) -> frozenset[str]:
    found: set[str] = set()
    for schema in schemas:
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or name in found or name.startswith("_foreach_"):
            continue
        if any(str(result.type) in _TENSOR_TYPES for result in schema.returns):
            found.add(name)
    return frozenset(found)
