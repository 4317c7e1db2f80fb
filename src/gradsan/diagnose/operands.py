"""Inputs of an operation in the words of the line: ``x`` and ``self.fc.weight`` instead of ``mat1`` and ``mat2``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradsan import source
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import inner_frames, place
from gradsan.diagnose.needs import Need
from gradsan.model import Frame, Message

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
"""By the operation that ``F.linear`` becomes: the place of each input among its arguments."""

_OPERATORS = {"@": ("mm", "mv", "bmm", "matmul", "dot"), "*": ("mul",), "/": ("div",), "+": ("add",), "**": ("pow",)}
_PLAIN = frozenset({"functional.py", "_tensor.py"})
_ROLES = {
    "input": "input",
    "weight": "weight",
    "bias": "bias",
    "mat1": "first",
    "batch1": "first",
    "tensor1": "first",
    "vec1": "first",
    "other": "second",
    "mat2": "second",
    "batch2": "second",
    "tensor2": "second",
    "vec2": "second",
}


def in_words(facts: Facts, names: Iterable[str]) -> Message | str:
    """The inputs ``names`` of the operation that saved a value, joined: in the user's words where the line tells."""
    need = facts.need
    assert need is not None
    return by_role(names, facts.op, need, _of_line(facts, need))


def by_role(names: Iterable[str], op: str, need: Need, known: Mapping[str, str] | None = None) -> Message | str:
    """The inputs ``names`` of ``op``, joined: in the words that are ``known``, else by what they are to it."""
    said = [(known or {}).get(name) or _role(name, op, need) for name in names]
    joined: Message | str = said[0]
    for more in said[1:]:
        joined = Message("label.and", {"one": joined, "other": more})
    return joined


def with_names(facts: Facts, names: Iterable[str]) -> str:
    """The inputs ``names`` as the formula calls them, each with the user's words for it where the line tells."""
    need = facts.need
    assert need is not None
    known = _of_line(facts, need)
    said = [f"{known[name]} ({name})" if known.get(name, name) != name else name for name in names]
    return ", ".join(said)


def _of_line(facts: Facts, need: Need) -> Mapping[str, str]:
    """The words for each input that the line tells of; what it does not decide is left out."""
    site = facts.conflict.save.site
    frame = place(site)
    operation = None if frame is None or facts.in_compiled else source.operation_at(frame)
    if operation is None:
        return {}
    inner = inner_frames(site)
    files = {one.file.replace("\\", "/").rsplit("/", 1)[-1] for one in inner}
    return _of_layer(operation, files, inner) if files - _PLAIN else _of_function(operation, need)


def _of_layer(layer: source.Operation, files: set[str], inner: Sequence[Frame]) -> Mapping[str, str]:
    kinds = files - {"module.py", *_PLAIN}
    is_one = sum(one.function.rpartition(".")[2] == "forward" for one in inner) == 1 and len(layer.arguments) == 1
    if len(kinds) != 1 or not is_one or any("multi_head" in one.function for one in inner):
        return {}
    said: dict[str, str] = {}
    for name, attribute in _LAYERS.get(kinds.pop(), {}).items():
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
