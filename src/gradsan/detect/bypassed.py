"""Parameters that a forward reads only without their graph: ``self.pos.data``, ``self.scale.item()``, ``float(…)``.

Read from the bytecode of the module's class when a parameter is found without a gradient; nothing is run. A parameter
that the class also reads with its graph (except in initialisers), or that a forward writes, is managed by the
program, and left out.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from gradsan import _torch, source
from gradsan._collector import cached_by_class
from gradsan.graph import naming
from gradsan.graph.bytecode import ASKS_FOR_SHAPE, functions_of, reads_of_method
from gradsan.graph.naming import modules_alive
from gradsan.heuristics import INITIALISERS
from gradsan.model import Clue, Site
from gradsan.record.log import Log, RawStack, logged_writes
from gradsan.record.stacks import symbolise

_PAST_GRAPH = frozenset({"data", "detach", "item", "tolist"})
_NUMBERS = frozenset({"float", "math"})
"""``float(…)``, and the functions of ``math``, take the number of a tensor."""
_NO_READ = ASKS_FOR_SHAPE | {"grad", "requires_grad_"}
_NO_FORWARD = INITIALISERS | {"__init__", "extra_repr"}
_IGNORED = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP", "RESUME", "PRECALL", "NOT_TAKEN"})


class Bypass(NamedTuple):
    """A read of a parameter without its graph: the expression (``self.pos.data``), and a raw stack of that place."""

    expression: str
    stack: RawStack


class _Read(NamedTuple):
    """One read of an attribute chain: the names after it, and the offset of the instruction that reads the next."""

    after: tuple[str, ...]
    offset: int
    is_stored: bool


def bypassed(core: Log, missing: Iterable[Any]) -> dict[int, Bypass]:
    """Return the parameters without a gradient that a forward reads without their graph, by ``id``."""
    wanted = {id(one): one for one in missing}
    if not wanted:
        return {}
    found: dict[int, Bypass] = {}
    for module in modules_alive(_may_bypass):
        kind: Any = type(module)
        for chain, parameter in _own_parameters(module):
            bypass = _bypass(kind, chain) if id(parameter) in wanted else None
            if bypass is not None:
                found[id(parameter)] = bypass
    written = _written_in_forward(core) if found else frozenset()
    return {key: one for key, one in found.items() if _torch.storage_or_none(wanted[key]) not in written}


def read_as_data(
    core: Log, parameter: Any, stack: RawStack, counts: dict[str, int], frame: FrameType
) -> tuple[Clue, ...] | None:
    """Return the clues of a parameter that was read as ``.data`` at ``stack``; None where that may be meant."""
    site, name = symbolise(stack), naming.name_of(parameter, frame)
    place = site.user_frame
    if place is None or name is None or source.is_conditional(place) or is_managed(core, parameter):
        return None
    if (found := source.read_as_data(place, name)) is None:
        return None
    read = Site((*site.frames[: site.frames.index(place)], found[1]))
    return (
        Clue("parameter", name=name, values={**_torch.facts_of(parameter), **counts}),
        Clue("read", read, name=found[0], values={"is_data": 1}),
    )


def is_managed(core: Log, parameter: Any) -> bool:
    """Whether a forward writes a parameter, or a method beside the forward of its class reads it with its graph."""
    for module in modules_alive():
        for chain in [chain for chain, one in _own_parameters(module) if one is parameter]:
            reached = {function.__code__ for function in reads_of_method(type(module), "forward").functions}
            others = (one for one in _functions_of_class(type(module)) if one.__name__ not in _NO_FORWARD)
            codes = (code for one in others if one.__code__ not in reached for code in _with_inner(one.__code__))
            if any(_is_plain(read) for code in codes for read in _reads(code, chain)):
                return True
    return _torch.storage_or_none(parameter) in _written_in_forward(core)


def unreached_beside(reached: set[int]) -> list[Any]:
    """Return parameters without a gradient of modules that have others among ``reached`` (ids), for ``bypassed``."""
    found = dict[int, Any]()
    for module in modules_alive(_may_bypass):
        if any(id(one) in reached for one in module.parameters()):
            own = (one for _, one in _own_parameters(module) if id(one) not in reached)
            found.update((id(one), one) for one in own if one.requires_grad and one.grad is None)
    return list(found.values())


@cached_by_class
def _may_bypass(kind: type) -> bool:
    """Whether the forward of a class reads anything without its graph."""
    codes = (code for one in _forwards(kind) for code in _with_inner(one))
    return any(not (_PAST_GRAPH | _NUMBERS).isdisjoint(code.co_names) for code in codes)


def _forwards(kind: type) -> frozenset[CodeType]:
    """The code that a class's ``forward`` runs; all its methods, where it has none: ``loss = model.loss(x)``."""
    if getattr(kind, "forward", None) is nn.Module.forward:
        return frozenset(one.__code__ for one in _functions_of_class(kind) if one.__name__ not in _NO_FORWARD)
    return frozenset(one.__code__ for one in reads_of_method(kind, "forward").functions)


def _own_parameters(module: nn.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield parameters with their attribute chains: the module's own, and those of torch's layers in it."""
    for name, parameter in module.named_parameters(recurse=False):
        yield (name,), parameter
    for name, child in module.named_children():
        if type(child).__module__.startswith("torch."):
            for inner, parameter in child.named_parameters(recurse=False):
                yield (name, inner), parameter


@cached_by_class
def _bypass(kind: type, chain: tuple[str, ...]) -> Bypass | None:
    reached = _forwards(kind)
    found: Bypass | None = None
    for function in _functions_of_class(kind):
        if function.__name__ in _NO_FORWARD:
            continue
        for code in _with_inner(function.__code__):
            for read in _reads(code, chain):
                # ``.data.mul_(…)`` and ``.data = …`` write memory without the graph.
                is_write = any(name.endswith("_") and not name.endswith("__") for name in read.after)
                if _is_plain(read) or read.is_stored or is_write:
                    return None
                if found is None and function.__code__ in reached and _is_past_graph(read.after[0]):
                    found = Bypass(_expression(f"self.{'.'.join(chain)}", read), RawStack((code,), (read.offset,)))
    return found


def _expression(name: str, read: _Read) -> str:
    if read.after[0].endswith("("):
        return f"{read.after[0]}{name})"
    return f"{name}.{read.after[0]}" + ("" if read.after[0] == "data" else "()")


def _is_past_graph(name: str) -> bool:
    return name in _PAST_GRAPH or name.endswith("(")


def _is_plain(read: _Read) -> bool:
    """Whether the parameter is read with its graph."""
    return not read.is_stored and (not read.after or not (_is_past_graph(read.after[0]) or read.after[0] in _NO_READ))


def _reads(code: CodeType, chain: tuple[str, ...]) -> Iterator[_Read]:
    """Yield every read of ``….a.b`` in a function, for the chain ``(a, b)``; a read of ``….a`` alone counts as one."""
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _IGNORED]
    for position, one in enumerate(instructions):
        if one.opname not in ("LOAD_ATTR", "LOAD_METHOD") or one.argval != chain[0]:
            continue
        names, stored = _following(instructions, position + 1)
        if names[: len(chain) - 1] != chain[1:]:
            yield _Read(names, one.offset, stored)
            continue
        after = names[len(chain) - 1 :]
        at = instructions[min(position + len(chain), len(instructions) - 1)]
        yield _Read(after or _taken_as_number(instructions, position, at), at.offset, stored)


def _taken_as_number(instructions: list[Any], position: int, after: Any) -> tuple[str, ...]:
    """``("math.exp(",)`` where ``self.a``, read at ``position``, is the only argument of such a call; else empty."""
    before = instructions[max(0, position - 3) : max(0, position - 1)]
    if not after.opname.startswith("CALL") or after.arg != 1 or not before:
        return ()
    inner = before[-1]
    if (inner.opname, inner.argval) == ("LOAD_GLOBAL", "float"):
        return ("float(",)
    is_of_math = (before[0].opname, before[0].argval) == ("LOAD_GLOBAL", "math")
    return (f"math.{inner.argval}(",) if is_of_math and inner.opname in ("LOAD_ATTR", "LOAD_METHOD") else ()


def _following(instructions: list[Any], position: int) -> tuple[tuple[str, ...], bool]:
    """Return the attributes that are read one after the other from here on, and whether the last is set."""
    names: list[str] = []
    for one in instructions[position:]:
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(one.argval))
        elif one.opname == "STORE_ATTR":
            return (*names, str(one.argval)), True
        else:
            break
    return tuple(names), False


def _functions_of_class(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "torch":
            for value in vars(base).values():
                yield from functions_of(value)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _written_in_forward(core: Log) -> frozenset[int]:
    """The storages that the forward of a module has written: statistics and codebooks that it maintains itself."""
    raws = logged_writes(core)
    stacks = {raw.stack for raw in raws}
    calls = {one for one in stacks if any(_torch.is_module_call(code.co_filename) for code in one.codes)}
    return frozenset(raw.storage for raw in raws if raw.stack in calls)
