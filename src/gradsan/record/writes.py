"""Logging wrappers for every Python name of torch that writes or makes Nodes, in place while gradsan is on.

What writes is read from the dispatcher's schemas.

Some of these names (``F.relu``, ``F.batch_norm``) are Python functions, and a wrapper has no source for
``torch.jit.script``: while it compiles, the originals are restored. Builtins need no such thing: the compiler's
table of them has their wrappers, too. What a detector puts over a builtin (``as_tensor``) is set aside as well.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.record.log import Core
from gradsan.record.patches import ABSENT, Patches, are


def let_scripts_compile(patches: Patches) -> None:
    """Restore what the compiler cannot read for as long as something is being scripted."""
    for owner, name in _torch.script_compilers():
        patches.set(owner, name, _compiling(patches, getattr(owner, name)))


def _compiling(patches: Patches, compile_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        with patches.aside(_hides_function) as originals:

            def resolving(resolve: Callable[[str], Any]) -> Callable[[str], Any]:
                # A name that the program imported refers to the wrapper.
                def resolved(name: str) -> Any:
                    found = resolve(name)
                    return originals.get(id(found), found)

                return resolved

            return compile_(*(_torch.with_lookup(one, resolving) for one in args), **kwargs)

    return compiling


def _hides_function(owner: Any, original: Any, value: Any) -> bool:
    """Whether a name of torch stands for a function whose source or builtin the compiler finds only in the original."""
    if not isinstance(owner, ModuleType) or owner.__name__.partition(".")[0] != "torch":
        return False
    has_source = isinstance(original, FunctionType) and owner is not torch
    return has_source or (_torch.is_builtin_of_scripts(original) and not _torch.is_builtin_of_scripts(value))


@dataclass(frozen=True, slots=True)
class Replacements:
    """Wrappers for names of ``owner``, and by the same names what the owner itself has while gradsan is off."""

    owner: Any
    wrappers: Mapping[str, Any]
    before: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every name of torch that is replaced, by its owner, and by the ``id`` of each original (original, wrapper)."""

    replacements: tuple[Replacements, ...]
    wrappers: Mapping[int, tuple[Any, Any]]
    for_jit: _torch.ShownToJit
    for_modes: _torch.ShownToModes


def plan(core: Core) -> Plan:
    """Return a wrapper for every writing method and function, and for every one that may make Nodes.

    This takes a quarter of a second, so a recorder does it once. It reads torch's own names, so it must be
    called while gradsan is off.
    """
    wrappers: dict[int, tuple[Any, Any]] = {}
    named: dict[int, tuple[Any, dict[str, Any]]] = {}

    def replace(owner: Any, name: str, function: Any, op: str, writer: Writer | None) -> None:
        known = wrappers.get(id(function))
        if known is None:
            known = wrappers[id(function)] = (function, _wrapped(core, function, op, writer))
        named.setdefault(id(owner), (owner, {}))[1].setdefault(name, known[1])

    for writer in tensor_methods():
        function = getattr(torch.Tensor, writer.op)
        if function is not None:
            replace(torch.Tensor, writer.op, function, writer.op, writer)
    writing = list(writing_functions())
    for namespace, name, function, writer in writing:
        replace(namespace, name, function, name, writer)
    for namespace, name, function in operations(writing):
        replace(namespace, name, function, name, None)
    replacements = tuple(
        Replacements(owner, own, {name: vars(owner).get(name, ABSENT) for name in own}) for owner, own in named.values()
    )
    pairs = tuple(wrappers.values())
    return Plan(replacements, wrappers, _torch.ShownToJit(pairs), _torch.ShownToModes(pairs))


def install(core: Core, patches: Patches, plan: Plan) -> None:
    """Put the wrappers in place. A name that others have replaced meanwhile is left alone."""
    for one in plan.replacements:
        members, before = vars(one.owner), one.before
        if are(members, before):
            patches.set_all(one.owner, one.wrappers, before)
        else:
            own = {name: wrapper for name, wrapper in one.wrappers.items() if members.get(name, ABSENT) is before[name]}
            patches.set_all(one.owner, own)
    for shown in (plan.for_jit, plan.for_modes):
        shown.put()
        patches.on_undo(shown.undo)
    _lead_defaults(patches, plan.wrappers)
    owner, name, function = _torch.function_apply()
    patches.set(owner, name, classmethod(_wrapped(core, function, name, None)))
    core.watch_indexing(True)
    patches.on_undo(lambda: core.watch_indexing(False))
    _watch_operators(core, patches)
    let_scripts_compile(patches)
    asked = _torch.weak_references_of_swaps()
    if asked is not None:
        patches.set(*asked)


def _lead_defaults(patches: Patches, wrappers: Mapping[int, tuple[Any, Any]]) -> None:
    """Make torch's own defaults the wrappers: layers check whether their activation *is* the function of that name."""
    for function in _torch.taking_activations():
        before = function.__defaults__
        if before:
            function.__defaults__ = tuple(wrappers.get(id(one), (one, one))[1] for one in before)
            patches.on_undo(functools.partial(setattr, function, "__defaults__", before))


def _wrapped(core: Core, function: Any, name: str, writer: Writer | None) -> Any:
    if writer is None:
        return core.writer(function, name, "plain", -1, None)
    wrapper = function
    for position in writer.positions:
        wrapper = core.writer(wrapper, writer.op, writer.kind, position, None)
    if writer.keyword:
        wrapper = core.writer(wrapper, writer.op, "out", -1, writer.keyword)
    return wrapper


def _watch_operators(core: Core, patches: Patches) -> None:
    operator, packet = _torch.operator_class(), _torch.operator_packet_class()
    known: dict[int, tuple[Any, _Written]] = {}

    def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        this = args[0]
        found = known.get(id(this))
        if found is None:
            one = this if operator is not None and isinstance(this, operator) else getattr(this, this.overloads()[0])
            # The operator is kept, so that its id is not reused.
            found = known[id(this)] = (this, _written_by(one._schema))
            if not found[1].arguments:
                core.quiet_operators.add(id(this))
        _log_operator(core, found[1], args[1:], kwargs)

    core.quiet_operators.clear()
    core.on_operator = called
    for owner in (operator, packet):
        if owner is not None:
            patches.set(owner, "__call__", core.writer(owner.__call__, "__call__", "operator", -1, None))


class _Written(NamedTuple):
    """The arguments that an operator writes according to its schema: positions and names."""

    name: str
    arguments: tuple[tuple[int, str], ...]


def _written_by(schema: Any) -> _Written:
    arguments = ((position, one) for position, one in enumerate(schema.arguments) if schema.is_mutable)
    return _Written(
        schema.name.partition("::")[2],
        tuple((position, one.name) for position, one in arguments if one.alias_info and one.alias_info.is_write),
    )


def _log_operator(core: Core, written: _Written, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stack = None
    for position, name in written.arguments:
        target = args[position] if position < len(args) else kwargs.get(name)
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if torch.is_tensor(tensor):
                stack = stack or core.stack(1)
                core.log_write(tensor, written.name, "op", None, stack)


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


def writing_functions() -> Iterator[tuple[Any, str, Any, Writer]]:
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

    ``writing`` is the result of :func:`writing_functions`.

    These are the methods and operators of ``torch.Tensor`` and the builtin functions of torch's namespaces whose aten
    operator returns a tensor. Those that write are in :func:`tensor_methods` and :func:`writing_functions`.
    ``__getitem__`` is not among them: set as an attribute, it would make every tensor a sequence
    (:mod:`gradsan.record.patches`). The native core replaces the C slot alone (``watch_indexing``); the pure one does
    not log indexing.
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
