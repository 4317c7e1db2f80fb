"""Writes to a caller's values by a module's ``forward``, or by a function whose result is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradsan import _torch, source
from gradsan.heuristics import is_named_in_place
from gradsan.model import Frame, Site, Write
from gradsan.record.log import RawStack, RawWrite
from gradsan.record.stacks import symbolise

PAIRS_KEPT = 1024
_NAME = re.compile(r"[A-Za-z_][\w.]*")


class Given(NamedTuple):
    """An argument that a function or ``forward`` wrote into: ``name`` in the caller's frame, ``own`` in its frame.

    ``written`` is its name at the write. The frames are those at ``outer`` and ``position`` in the
    stack of the write.
    """

    position: int
    outer: int
    own: str
    written: str
    name: str
    is_forward: bool


def given_to(raw: RawWrite, written: Site) -> Iterator[Given]:
    """Yield the arguments that a write went to, from the innermost function outwards.

    ``forward`` may have passed its argument on: to a function of its own, or to an inner module. A call as a statement
    is made for its write, and so is a call of a function named like an in-place one; unless the function has detached
    its argument, as if that made a copy. So is a write after which no function on the way reads the value. What a
    method writes in ``self`` is the object's own state, whoever holds the object.
    """
    frames = written.frames
    position = max((at for at, frame in enumerate(frames) if frame.is_user), default=0)
    named = source.written_expression(frames[position], raw.op, frames[position + 1 :]) if frames else None
    first, is_left = named, True
    while named is not None and position:
        own, here = frames[position], named
        is_procedure = is_named_in_place(own.function)
        private = source.detached_for_copy(own, here) if here is first and not is_procedure else None
        named = source.alias_of(own, named) or named
        is_left = is_left and source.is_left_to_caller(own, {here, named}, is_write=here is first)
        at = own
        if private is not None:
            at, named, _ = private
        if _root(named) in ("self", "cls"):
            return
        outer = max((at for at, frame in enumerate(frames[:position]) if frame.is_user), default=None)
        if outer is None:
            return
        between = frames[outer + 1 : position]
        given = source.callers_expression(named, at, frames[outer], between)
        if private is not None:
            # A measure of what a network has computed; others prepare the data in place.
            beside = (source.callers_expression(one, at, frames[outer], between) for one in private[2])
            if not any(one is not None and source.is_computed_by_program(frames[outer], one) for one in beside):
                private = None
        is_forward = own.function.endswith("forward") and _torch.is_module_call(frames[position - 1].file)
        is_taken = outer == position - 1 and not is_named_in_place(own.function) and source.takes_result(frames[outer])
        is_meant = is_left and private is None
        if (
            (is_forward or is_taken or private is not None)
            and not is_meant
            and given is not None
            and _is_argument(named, own, raw.stack)
        ):
            yield Given(position, outer, named, here, given, is_forward)
        named = given
        position = outer


def given_twice(raw: RawWrite, written: Site) -> tuple[int, int, str, source.SecondName] | None:
    """The function that wrote into an argument, and reads another one for which its caller gave the same tensor.

    The positions of both in the stack of the write, the name of the written argument, and the second name.
    """
    frames = written.frames
    users = [at for at, frame in enumerate(frames) if frame.is_user]
    if len(users) < 2 or is_named_in_place(frames[users[-1]].function):
        return None
    outer, position = users[-2:]
    own, between = frames[position], frames[outer + 1 : position]
    named = source.written_expression(own, raw.op, frames[position + 1 :])
    given = None if named is None else source.callers_expression(named, own, frames[outer], between)
    if named is None or given is None or not _NAME.fullmatch(given):
        return None
    for other in source.parameter_names(own):
        if other != named and source.callers_expression(other, own, frames[outer], between) == given:
            read = source.read_behind(own, other)
            if read is not None:
                return position, outer, named, source.SecondName(other, "twice", frames[outer].line, read, None)
    return None


def gives_one_twice(written: Site, own: Frame, names: tuple[str, str]) -> bool:
    """Whether the caller of the function at ``own`` gives one expression for both: ``standardise(x, x)``."""
    frames, position = written.frames, written.frames.index(own)
    outer = max((at for at, frame in enumerate(frames[:position]) if frame.is_user), default=None)
    if outer is None or not {one.removesuffix(".data") for one in names} <= set(source.parameter_names(own)):
        return False
    between = frames[outer + 1 : position]
    first, second = (source.callers_expression(one, own, frames[outer], between) for one in names)
    return first is not None and first == second


class WritesToCallers:
    """Cache of writes to a value that the caller then read, by pair of lines."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str, Any], bool] = {}

    def forget(self) -> None:
        """Drop the stacks, at the start of a stretch of watching."""
        self._known.clear()

    def has(self, raw: RawWrite, write: Write, stack: RawStack, read: Site) -> bool:
        """Whether a module's ``forward``, or a function whose result is used, wrote into a value its caller then read.

        ``stack`` is that of ``read``. The answer is read off the source: once, for a loop asks again in each round.
        """
        key = (raw.stack, raw.op, stack)
        if (known := self._known.get(key)) is None:
            if len(self._known) >= PAIRS_KEPT:
                self._known.clear()
            known = self._known[key] = _is_of_caller(raw, write.site, read)
        return known


def _is_of_caller(raw: RawWrite, written: Site, read: Site) -> bool:
    return any(
        _is_read_by_caller(written.frames, one.position, one.outer, read)
        and source.is_made_in_round(written.frames[one.outer], one.name)
        and source.reads_again(one.name, written.frames[one.outer], read.frames[one.outer])
        for one in given_to(raw, written)
    )


def _is_argument(named: str, own: Frame, stack: RawStack) -> bool:
    """Whether an expression begins with a parameter of the function at ``own``."""
    name = own.function.rpartition(".")[2]
    codes = [
        code
        for code in stack.codes
        if code.co_filename == own.file and code.co_name == name and code.co_firstlineno <= own.line
    ]
    code = max(codes, key=lambda code: int(code.co_firstlineno), default=None)
    return code is not None and _root(named) in code.co_varnames[: code.co_argcount]


def is_of_own_value(stack: RawStack, op: str) -> bool:
    """Whether a statement changes a value of its own function, or one that the function returns: ``logits += prior``.

    A function that only reads what it computes from an argument was not asked to change that.
    """
    frame = symbolise(stack).user_frame
    name = None if frame is None or source.operand_given(frame) is None else source.written_expression(frame, op, ())
    if frame is None or name is None:
        return False
    is_given = _is_argument(name, frame, stack) and _root(name) != "self"
    return not is_given or is_named_in_place(frame.function) or source.returns_argument(frame, name)


def _root(named: str) -> str:
    return re.split(r"[.\[]", named, maxsplit=1)[0]


def _is_read_by_caller(frames: tuple[Frame, ...], position: int, outer: int, read: Site) -> bool:
    own = frames[position]
    if len(read.frames) <= outer:
        return False
    inside = any((frame.file, frame.function) == (own.file, own.function) for frame in read.frames[outer + 1 :])
    caller = [(frame.file, frame.function) for frame in frames[: outer + 1]]
    return not inside and [(frame.file, frame.function) for frame in read.frames[: outer + 1]] == caller
