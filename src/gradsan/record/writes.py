"""Logging wrappers for every Python name of torch that writes or makes Nodes, in place while gradsan is on.

Some of these names (``F.relu``, ``F.batch_norm``) are Python functions, and a wrapper has no source for
``torch.jit.script``: while it compiles, the originals are restored. Builtins need no such thing: the compiler's
table of them has their wrappers, too. What a detector puts over a builtin (``as_tensor``) is set aside as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.record import writers
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

    def replace(owner: Any, name: str, function: Any, op: str, writer: writers.Writer | None) -> None:
        known = wrappers.get(id(function))
        if known is None:
            known = wrappers[id(function)] = (function, _wrapped(core, function, op, writer))
        named.setdefault(id(owner), (owner, {}))[1].setdefault(name, known[1])

    for writer in writers.tensor_methods():
        function = getattr(torch.Tensor, writer.op)
        if function is not None:
            replace(torch.Tensor, writer.op, function, writer.op, writer)
    writing = list(writers.functions())
    for namespace, name, function, writer in writing:
        replace(namespace, name, function, name, writer)
    for namespace, name, function in writers.operations(writing):
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


def _wrapped(core: Core, function: Any, name: str, writer: writers.Writer | None) -> Any:
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
