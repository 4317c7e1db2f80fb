"""Variables and attributes that a function's bytecode reads and binds, and objects whose methods use an attribute."""

from __future__ import annotations

import dis
import functools
import itertools
import operator
import re
import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from gradsan import _torch
from gradsan._collector import cached_by_class, kinds_below, objects_of
from gradsan._imports import stored_in
from gradsan.graph.variables import Found, Scope, Space
from gradsan.model import Clue, Site
from gradsan.record.raw_stacks import RawStack
from gradsan.record.stacks import definition_site, is_user_file

ASKS_FOR_SHAPE = frozenset(
    {"shape", "size", "dim", "ndim", "numel", "dtype", "device", "layout", "requires_grad", "is_cuda", "stride"}
)
"""Attributes of a tensor that do not depend on its elements."""
_CHANGES_CONTAINER = frozenset(
    {"add", "append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update"}
)
_CODES_FOLLOWED = 64
_WITHOUT_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP", "RESUME", "PRECALL", "NOT_TAKEN"})


class Reads(NamedTuple):
    """Names that code reads, including those of the functions it defines.

    ``globals``, ``free`` and ``own`` (parameters and locals) map a variable to the attributes that are read of
    it, None where it is used as a whole. ``attributes`` are all attributes read of anything, ``bound`` all names and
    attributes that the code binds outside of its own locals.
    """

    globals: dict[str, frozenset[str] | None]
    free: dict[str, frozenset[str] | None]
    own: dict[str, frozenset[str] | None]
    attributes: frozenset[str]
    bound: frozenset[str]


class ClassReads(NamedTuple):
    """Attributes that a method of a class, with the methods and properties it uses, reads and binds; their code."""

    attributes: frozenset[str]
    bound: frozenset[str]
    references: tuple[weakref.ref[FunctionType], ...]

    @property
    def functions(self) -> tuple[FunctionType, ...]:
        """The functions themselves."""
        return tuple(one for reference in self.references if (one := reference()) is not None)


@functools.lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> Reads:
    """Return the names that ``code`` reads."""
    tables: dict[str, dict[str, set[str] | None]] = {"globals": {}, "free": {}, "own": {}}
    attributes: set[str] = set()
    bound: set[str] = set()
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _WITHOUT_EFFECT]
    for position, (one, following) in enumerate(zip(instructions, [*instructions[1:], None], strict=False)):
        name = one.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(str(one.argval))
            if one.argval in _CHANGES_CONTAINER and position:
                bound.add(str(instructions[position - 1].argval))
        elif name in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"):
            bound.add(str(one.argval))
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            # The container and the key precede it; a simple key takes one or two instructions.
            bound |= {str(before.argval) for before in instructions[max(0, position - 3) : position - 1]}
        elif name == "DUP_TOP_TWO" or (
            name == "COPY"
            and one.arg == 2
            and following is not None
            and (following.opname, following.arg) == ("COPY", 2)
        ):
            # ``container[key] += …`` keeps both on the stack until it stores.
            bound |= {str(before.argval) for before in instructions[max(0, position - 2) : position]}
        for variable, is_last in _loaded(code, one):
            table = tables[_kind(code, one.opname, variable)]
            if is_last and following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                known = table.setdefault(variable, set())
                if known is not None:
                    known.add(str(following.argval))
            elif not (is_last and following is not None and following.opname in ("STORE_ATTR", "DELETE_ATTR")):
                table[variable] = None
    inner = [reads_of(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    for one_inner in inner:
        _join(tables["globals"], one_inner.globals)
        for variable, read in one_inner.free.items():
            _join(tables["free" if variable in code.co_freevars else "own"], {variable: read})
    frozen = {
        kind: {key: None if read is None else frozenset(read) for key, read in table.items()}
        for kind, table in tables.items()
    }
    return Reads(
        frozen["globals"],
        frozen["free"],
        frozen["own"],
        frozenset(attributes.union(*(each.attributes for each in inner))),
        frozenset(bound.union(*(each.bound for each in inner))),
    )


@cached_by_class
def reads_of_method(kind: type, name: str) -> ClassReads:
    """Return the reads of the method ``name`` of a class, with the methods and properties that it uses by name."""
    waiting, functions = [name], list[FunctionType]()
    attributes: set[str] = set()
    bound: set[str] = set()
    seen: set[str] = set()
    while waiting and len(functions) < _CODES_FOLLOWED:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for function in functions_of(getattr_static(kind, current)):
            functions.append(function)
            reads = reads_of(function.__code__)
            attributes |= reads.attributes
            bound |= reads.bound
            waiting += sorted(reads.attributes)
    return ClassReads(frozenset(attributes), frozenset(bound), tuple(map(weakref.ref, functions)))


def _is_counted_up(instructions: list[dis.Instruction], position: int) -> bool:
    """Whether an augmented assignment changes the attribute read at ``position``, or an element of it.

    It copies the owner of an attribute, or a container with its index below the top of the stack, before it reads them.
    """
    if position and instructions[position - 1].opname in ("COPY", "DUP_TOP"):
        return True
    depth = 1
    for one in instructions[position + 1 :]:
        if one.opname in ("COPY", "DUP_TOP_TWO"):
            return depth > 1 and (one.opname == "DUP_TOP_TWO" or one.arg == depth)
        depth += dis.stack_effect(one.opcode, one.arg)
        if depth < 1:
            return False
    return False


@functools.lru_cache(maxsize=4096)
def values_read(code: CodeType, attribute: str) -> bool:
    """Whether ``code`` reads more of ``something.attribute`` than its shape or type, judged by the next instruction.

    What it only counts up, ``ctx.calls[0] += 1``, has no part in what it computes.
    """
    instructions = [one for one in dis.get_instructions(code) if one.opname not in _WITHOUT_EFFECT]
    for position, one in enumerate(instructions):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and one.argval == attribute:
            following = instructions[position + 1] if position + 1 < len(instructions) else None
            asked = (
                following.argval if following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD") else None
            )
            called = str(instructions[position - 2].argval) if position >= 2 else ""
            is_asked = asked in ASKS_FOR_SHAPE or called.endswith("_like")
            if not is_asked and not _is_counted_up(instructions, position):
                return True
    return any(values_read(inner, attribute) for inner in code.co_consts if isinstance(inner, CodeType))


def functions_of(value: Any) -> tuple[FunctionType, ...]:
    """Return the Python functions behind a class attribute: a function, a method, a property, a decorated function."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    if isinstance(value, property):
        return () if value.fget is None else functions_of(value.fget)
    if not isinstance(value, FunctionType):
        return ()
    wrapped = getattr(value, "__wrapped__", None)
    return (value, *functions_of(wrapped)) if isinstance(wrapped, FunctionType) else (value,)


def getattr_static(kind: type, name: str) -> Any:
    """Return an attribute of a class or its bases, without running a descriptor; None where there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _loaded(code: CodeType, instruction: Any) -> Iterator[tuple[str, bool]]:
    """Yield the variables an instruction loads, each with whether it is on top of the stack afterwards."""
    name = instruction.opname
    if (
        not name.startswith("LOAD_")
        or "ATTR" in name
        or not any(part in name for part in ("FAST", "DEREF", "GLOBAL", "NAME"))
    ):
        return
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    for position, variable in enumerate(names):
        # From 3.13 on, the cells that a new function gets are loaded as if they were variables.
        is_cell = "FAST" in name and variable in (*code.co_cellvars, *code.co_freevars)
        if isinstance(variable, str) and not (is_cell and variable not in code.co_varnames):
            yield variable, position == len(names) - 1


def _kind(code: CodeType, opname: str, variable: str) -> str:
    if "GLOBAL" in opname or opname == "LOAD_NAME":
        return "globals"
    return "free" if variable in code.co_freevars else "own"


def _join(table: dict[str, set[str] | None], more: dict[str, frozenset[str] | None]) -> None:
    for variable, read in more.items():
        known = table.setdefault(variable, set())
        table[variable] = None if known is None or read is None else known | read


def spaces_of_objects() -> list[Space]:
    """Return the live objects of the program's classes as variables, each under the name of its class.

    The classes are those at the top of the program's modules, and all modules of PyTorch that the program defines.
    """
    kinds = {one for one in (*_classes_at_top(), *kinds_below(nn.Module)) if _is_of_program(one)}
    return [Space(Scope("", type(one).__name__), {type(one).__name__: one}, frozenset()) for one in objects_of(kinds)]


def _classes_at_top() -> Iterator[type]:
    for module in list(sys.modules.values()):
        stored = stored_in(module)
        if is_user_file(stored.get("__file__") or "<frozen"):
            # Not ``isinstance``: ``__class__`` of a proxy may run code.
            yield from (one for one in list(stored.values()) if issubclass(type(one), type))


def _is_of_program(kind: type) -> bool:
    return is_user_file(stored_in(sys.modules.get(str(kind.__module__))).get("__file__") or "<frozen")


def is_run_by_library(stack: RawStack) -> bool:
    """Whether a package other than torch runs the code that called torch: a trainer, an engine, an event handler."""
    in_torch = operator.methodcaller("startswith", _torch.package_folder())
    files = itertools.dropwhile(in_torch, (code.co_filename for code in stack.codes))
    of_user = [is_user_file(file) for file in files]
    return not all(itertools.dropwhile(operator.not_, reversed(of_user)))


def holder_clue(path: str, found: Found) -> tuple[Clue, ...]:
    """Return the clue ``holder`` for ``path``, where ``found`` lies; none where no class of the program has it.

    Its site are the methods of the innermost object's class that name the attribute; its ``name`` is ``path`` as such
    a method spells it (``self.total``).
    """
    for prefix, holder in reversed(found.around):
        rest = path[len(prefix) :] if path.startswith(prefix) else ""
        attribute = re.match(r"\.(\w+)", rest)
        if attribute is None:
            continue
        members = (one for kind in type(holder).__mro__ for one in list(vars(kind).values()))
        codes = (one.__code__ for one in members if isinstance(one, FunctionType))
        named = (code for code in codes if attribute[1] in code.co_names and code.co_argcount)
        own = [code for code in named if is_user_file(code.co_filename)]
        if own:
            frames = tuple(frame for code in own for frame in definition_site(code).frames)
            return (Clue("holder", Site(frames), name=f"{own[0].co_varnames[0]}{rest}"),)
    return ()
