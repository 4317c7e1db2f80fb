"""Names of a conflict's tensor and of the inputs of the operation that saved it, in functions of the user's source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradsan import source
from gradsan.diagnose.needs import Need
from gradsan.model import Conflict, Frame, Message, Site, Write

TAKE_IN = ("from_numpy", "as_tensor", "frombuffer", "from_dlpack")
"""Functions that take in memory of others without a copy."""

# Saved by an operation inside of a layer that was called, these are the layer's own and no argument of the call.
_INDEX = re.compile(r"indices\[(\d+)\]")
_OF_A_LAYER = ("weight", "mat2")


def name_of(conflict: Conflict, writes: Iterable[Write]) -> tuple[str | Message, str]:
    """The name and its kind: a lasting name first, then the writing line's, then any live variable."""
    # A tensor with a history is no data: a variable that is data holds a detached alias of it.
    passing = ("value", "data") if conflict.save.tensor.requires_grad else ("value",)
    lasting = next((name for name in conflict.names if name.kind not in passing), None)
    written = _written(conflict, writes)
    if lasting is not None:
        # batch[0] says less than the variable in the writing line; p of "for p in params" says nothing.
        is_position = lasting.kind == "data" and re.search(r"\[\d+\]$", lasting.text)
        return (written if is_position and written is not None else lasting.text), lasting.kind
    if written is not None:
        return written, "value"
    if conflict.names:
        return conflict.names[0].text, conflict.names[0].kind
    return _at_save(conflict) or _taken_in(writes) or _nameless(conflict), "value"


def producer(conflict: Conflict) -> str | None:
    """The callee where a value without a name of its own was saved: ``self.net`` of ``return self.net(x)``."""
    frame = conflict.save.site.shown_frame
    return source.called_expression(frame) if frame is not None else None


def _written(conflict: Conflict, writes: Iterable[Write]) -> str | None:
    """The written expression of the first write that shows one, as spelled in the function that also saved it."""
    for write in writes:
        frame = write.site.shown_frame
        found = None if frame is None else source.written_expression(frame, write.op, write.site.inner_frames)
        if found is not None:
            return _where_saved(found, write.site, conflict)
    return None


def _taken_in(writes: Iterable[Write]) -> str | None:
    """``buffer`` of the ``torch.from_numpy(buffer)`` that imported the memory, which was then written from outside."""
    frames = [write.site.shown_frame for write in writes if write.kind == "outside" and write.op in TAKE_IN]
    return next((name for frame in frames if frame is not None and (name := source.first_argument(frame))), None)


def _where_saved(name: str, site: Site, conflict: Conflict) -> str:
    written, saved = site.user_frames, conflict.save.site.user_frames
    level = shared_level(written, saved)
    if level < 0:
        return name
    found = lifted(name, written, level, site)
    if found is None:
        # A hook's, or a backward's, own name for what the function that saved it has a variable of.
        held = {one.text for one in conflict.names}.intersection(operands_at_save(conflict))
        return held.pop() if len(held) == 1 and level == len(saved) - 1 else name
    result = result_at_save(conflict) if conflict.save.is_output else None
    there = source.operand_expressions(saved[-1]) if result is None else [result]
    at_save = {lifted(one, saved, level) for one in there}
    alias = source.alias_of(written[level], found) if found not in at_save else None
    return alias if alias is not None and alias in at_save else found


def _at_save(conflict: Conflict) -> str | None:
    if conflict.save.is_output:
        return result_at_save(conflict)
    operands = operands_at_save(conflict)
    return operands[0] if len(operands) == 1 else None


def result_at_save(conflict: Conflict) -> str | None:
    """The name that the user's line binds to the result of the operation that saved it.

    None where the line computes further with the result of the call, or calls layers one after another: it then
    binds another tensor.
    """
    frame = conflict.save.site.shown_frame
    statement = source.statement_at(frame) if frame is not None else None
    if frame is None or statement is None or not source.binds_result(frame):
        return None
    names = source.assigned_names(statement)
    inner = conflict.save.site.inner_frames
    return names[0] if len(names) == 1 and not any("container.py" in below.file for below in inner) else None


def operands_at_save(conflict: Conflict) -> list[str]:
    """The user's expressions for the operands of the operation that saved one of them.

    Empty where that line called layers one after another, or where the saved operand is a layer's own parameter:
    the line's operands are then other tensors.
    """
    frame = conflict.save.site.shown_frame
    if frame is None:
        return []
    inner = conflict.save.site.inner_frames
    if any("container.py" in below.file for below in inner) or (inner and conflict.save.slot in _OF_A_LAYER):
        return []
    operation, side = source.operation_at(frame), _SIDES.get(conflict.save.slot or "")
    if operation is not None and side is not None and operation.called in _OPERATORS and len(operation.arguments) == 2:
        one, other = operation.arguments
        if one is None or other is None:
            # In ``weight * torch.from_numpy(batch)`` the only name may be that of the other side.
            return [name] if (name := (one, other)[side]) is not None else []
    index = _INDEX.fullmatch(conflict.save.slot or "")
    return source.operand_expressions(frame) if index is None else source.index_expressions(frame, int(index[1]))


def _nameless(conflict: Conflict) -> Message:
    callee = producer(conflict)
    return Message("label.unnamed") if callee is None else Message("label.value_inside", {"callee": callee})


_LAYERS = {
    "linear.py": {"self": "bias", "mat1": "", "mat2": "weight", "input": "", "weight": "weight", "bias": "bias"},
    "conv.py": {"input": "", "self": "", "weight": "weight", "bias": "bias"},
    "batchnorm.py": {"input": "", "weight": "weight", "bias": "bias"},
    "normalization.py": {"input": "", "self": "", "weight": "weight", "bias": "bias"},
    "sparse.py": {"weight": "weight"},
    "activation.py": {"self": "", "input": ""},
}
"""By the file of a layer of torch.nn that does one operation: the layer's attribute for each input, ``""`` for what the
layer was called with."""

_LINEAR = {
    "addmm": {"self": 2, "mat1": 0, "mat2": 1},
    "mm": {"self": 0, "mat2": 1},
    "linear": {"input": 0, "weight": 1, "bias": 2},
}
"""The argument position of each input, by the operation that ``F.linear`` becomes."""

_OPERATORS = {"@": ("mm", "mv", "bmm", "matmul", "dot"), "*": ("mul",), "/": ("div",), "+": ("add",), "**": ("pow",)}
_SIDES = {"self": 0, "other": 1, "mat2": 1, "exponent": 1}
_PLAIN = frozenset({"functional.py", "_tensor.py"})
_ROLES = {
    **{one: one for one in ("input", "weight", "bias")},
    **dict.fromkeys(("mat1", "batch1", "tensor1", "vec1"), "first"),
    **dict.fromkeys(("other", "mat2", "batch2", "tensor2", "vec2"), "second"),
}


def inputs_in_words(conflict: Conflict, need: Need, names: Iterable[str], op: str) -> Message | str:
    """The inputs ``names`` of the operation that saved a value, joined: the user's expressions where known."""
    return inputs_by_role(names, op, need, _of_line(conflict, need))


def inputs_with_names(conflict: Conflict, need: Need, names: Iterable[str]) -> str:
    """The inputs ``names`` as in the formula, each with the user's expression where the line shows it."""
    known = _of_line(conflict, need)
    return ", ".join(f"{known[name]} ({name})" if known.get(name, name) != name else name for name in names)


def operand_in_slot(conflict: Conflict, need: Need) -> str | None:
    """The user's expression for the saved operand by its place among the arguments; None where the line is unclear."""
    return None if conflict.save.site.inner_frames else _of_line(conflict, need).get(need.slot)


def inputs_by_role(names: Iterable[str], op: str, need: Need, known: Mapping[str, str] | None = None) -> Message | str:
    """The inputs ``names`` of ``op``, joined: the ``known`` expressions, else their roles."""
    said = [(known or {}).get(name) or _role(name, op, need) for name in names]
    joined: Message | str = said[0]
    for more in said[1:]:
        joined = Message("label.and", {"one": joined, "other": more})
    return joined


def _of_line(conflict: Conflict, need: Need) -> Mapping[str, str]:
    """The expressions for each input that the line shows; ambiguous ones are left out."""
    site = conflict.save.site
    frame = site.shown_frame
    operation = None if frame is None else source.operation_at(frame)
    if operation is None:
        return {}
    inner = site.inner_frames
    files = {one.file.replace("\\", "/").rsplit("/", 1)[-1] for one in inner}
    return _of_layer(operation, files, inner, need) if files - _PLAIN else _of_function(operation, need)


def _of_layer(layer: source.Operation, files: set[str], inner: Sequence[Frame], need: Need) -> Mapping[str, str]:
    kinds = files - {"module.py", *_PLAIN}
    is_one = sum(one.function.rpartition(".")[2] == "forward" for one in inner) == 1 and len(layer.arguments) == 1
    if len(kinds) != 1 or not is_one or any("multi_head" in one.function for one in inner):
        return {}
    said: dict[str, str] = {}
    for name, attribute in _LAYERS.get(kinds.pop(), {}).items():
        if name == "self" and need.op == "mm":
            attribute = ""  # a linear layer without a bias
        words = f"{layer.called}.{attribute}" if attribute else layer.arguments[0]
        if words is not None and re.fullmatch(r"[\w.\[\]]+", words):
            said[name] = words
    return said


def _of_function(function: source.Operation, need: Need) -> Mapping[str, str]:
    name = function.called.rpartition(".")[2]
    given = function.arguments if function.receiver is None else (function.receiver or None, *function.arguments)
    if name == "linear" and function.receiver is None:
        places = _LINEAR.get(need.op, {})
        return {one: words for one, at in places.items() if at < len(given) and (words := given[at]) is not None}
    names = (name.strip("_"), re.sub(r"^conv\dd$", "convolution", name))
    if need.op not in (*names, *_OPERATORS.get(function.called, ())):
        return {}
    return {one: words for one, words in zip(need.inputs, given, strict=False) if words is not None}


def _role(name: str, op: str, need: Need) -> Message | str:
    role = _ROLES.get(name)
    if name == "self":
        role = "input" if len(need.inputs) == 1 else "bias" if need.op == "addmm" else "first"
    return name if role is None else Message(f"label.input.{role}", {"op": op})


def shared_level(first: Sequence[Frame], second: Sequence[Frame]) -> int:
    """The index of the innermost function on both stacks, -1 where they share none (other threads)."""
    level = -1
    for a, b in zip(first, second, strict=False):
        if (a.file, a.function) != (b.file, b.function):
            break
        level += 1
        if a.line != b.line:
            break
    return level


def lifted(name: str, frames: Sequence[Frame], level: int, site: Site | None = None) -> str | None:
    """The expression in the function at ``level`` for ``name`` of the innermost of ``frames``; None if not known.

    ``site`` is the whole stack of the user frames: the frames in between show the arguments of a hook.
    """
    found = name
    for depth in range(len(frames) - 1, level, -1):
        inner, outer = frames[depth], frames[depth - 1]
        between = _between(site, outer, inner)
        given = source.callers_expression(found, inner, outer, between)
        if given is None and (alias := source.alias_of(inner, found)) is not None:
            given = source.callers_expression(alias, inner, outer, between)
        if given is None:
            return None
        found = given
    return found


def _between(site: Site | None, outer: Frame, inner: Frame) -> tuple[Frame, ...]:
    if site is None:
        return ()
    first, last = (next(at for at, frame in enumerate(site.frames) if frame is one) for one in (outer, inner))
    return site.frames[first + 1 : last]
