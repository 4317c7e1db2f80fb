"""Lists whose elements are one tensor: what a loop collects without a copy, and ``[tensor] * n``."""

from __future__ import annotations

import ast
from collections.abc import Sized
from types import CodeType, FrameType
from typing import Any, TypeAlias

from gradsan import source
from gradsan.detect.gradients.kept_gradients import COMPREHENSIONS
from gradsan.graph import naming
from gradsan.graph.live import own_attribute, value_of
from gradsan.model import Frame, Site
from gradsan.record.log import RawWrite
from gradsan.record.stacks import is_user_file, symbolise

Elements: TypeAlias = tuple[Site, str, Frame, source.SecondName]
"""The write, the name of what was written, the function that has the list, and the list as a second name."""


def collected(raws: list[RawWrite], frame: FrameType | None) -> Elements | None:
    """Return a tensor, written repeatedly, that a caller's loop collects without a copy, or ``[tensor] * n`` holds."""
    last = raws[-1]
    keeper = naming.collected_in(last.storage, frame)
    if keeper is None:
        return None
    written = symbolise(last.stack)
    *callers, own = [one for one in written.frames if one.is_user]
    name = source.written_expression(own, last.op, ())
    for caller in (own, *reversed(callers)):
        second = source.collected_result(caller, keeper)
        if second is not None and name is not None:
            return written, name, caller, second
    place = None if name is None else _repeated(written, own, name)
    if name is None or place is None:
        return None
    name = name if "[" in name else source.walked_over(own, name)[0]
    return written, name, place, source.SecondName(keeper, "list", place.line, own.line, None)


def repeated(raws: list[RawWrite], frame: FrameType | None) -> Elements | None:
    """Return an element of ``[tensor] * n`` by which a loop wrote one memory alone, where n is known, and not one.

    The list may be gone: it was made for the length of a call.
    """
    if len(raws) < 2 or len({raw.storage for raw in raws}) > 1:
        return None
    written = symbolise(raws[-1].stack)
    own = next((one for one in reversed(written.frames) if one.is_user), None)
    name = None if own is None else source.written_expression(own, raws[-1].op, ())
    place = None if own is None or name is None else source.one_many_times(own, name)
    if own is None or name is None or place is None or not source.is_in_loop(own):
        return None
    key = (name if "[" in name else source.walked_over(own, name)[0]).partition("[")[0]
    times = source.times_in_list(place, key)
    if times is None or any(number is None or number < 2 for number in _numbers(times, own, raws[-1], frame)):
        return None
    name = name if "[" in name else f"{key}[...]"
    return written, name, place, source.SecondName(key, "list", place.line, own.line, None)


def _numbers(text: str, own: Frame, raw: RawWrite, frame: FrameType | None) -> list[int | None]:
    """The values that ``3``, ``depth``, ``self.depth`` or ``len(self.layers)`` may have had in the function ``own``."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Constant):
        return [node.value if type(node.value) is int else None]
    call = node if isinstance(node, ast.Call) and len(node.args) == 1 else None
    if call is not None and not (isinstance(call.func, ast.Name) and call.func.id == "len"):
        return [None]
    path = ast.unparse(node if call is None else call.args[0])
    first, _, rest = path.partition(".")
    code = next((one for one in raw.stack.codes if is_user_file(one.co_filename)), None)
    values: list[Any] = []
    if first == "self" and code is not None:
        for owner in naming.modules_alive(lambda kind: getattr(_function(kind, code), "__code__", None) is code):
            value: Any = owner
            for part in rest.split("."):
                value = own_attribute(value, part, None)
            values.append(value)
    while frame is not None and first != "self":
        if frame.f_code is code or (code is not None and first not in code.co_varnames and _is_of(frame, code)):
            values.append(value_of(frame, path))
        frame = frame.f_back
    sizes = (len(one) if call is not None and isinstance(one, Sized) else one for one in values)
    return [one if type(one) is int else None for one in sizes] or [None]


def _repeated(written: Site, own: Frame, name: str) -> Frame | None:
    """Return the place of ``[tensor] * n``, in the writing function or one that has given it the list."""
    frames, held = written.frames[: written.frames.index(own) + 1], name
    place, inner = source.one_many_times(own, name), len(frames) - 1
    for outer in reversed([at for at, frame in enumerate(frames[:-1]) if frame.is_user]):
        key, bracket, rest = held.partition("[")
        if place is not None or not bracket:
            break
        given = source.callers_expression(key, frames[inner], frames[outer], frames[outer + 1 : inner])
        # A comprehension is a function of its own in some versions, with its caller's names.
        held, inner = f"{given or key}[{rest}", outer
        if given is None and not frames[inner].function.endswith(COMPREHENSIONS):
            break
        place = source.one_many_times(frames[outer], held)
    return place


def _function(kind: type, code: CodeType) -> Any:
    return getattr(kind, code.co_name, None)


def _is_of(frame: FrameType, code: CodeType) -> bool:
    """Whether a frame is the module's own, whose variables the function reads as globals."""
    return frame.f_code.co_name == "<module>" and frame.f_code.co_filename == code.co_filename
