"""Values of earlier rounds in objects and containers, detached once a round is over."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame, Held, Layer
from gradsan.source.calls import dies_with_call
from gradsan.source.change import Change
from gradsan.source.locate import statement_at
from gradsan.source.modules import object_cut
from gradsan.source.rounds import after_round, deque_made
from gradsan.source.tree import SourceFile

_CLASSES = {"tuple": "tuple", "namedtuple": "tuple", "list": "list", "dict": "dict", "deque": "deque"}
_MOST_CUT = 4


def detach_held(frames: Sequence[Frame], held: Sequence[Held]) -> tuple[Change, tuple[str, ...]] | None:
    """A line after the round of ``frames`` that detaches the values described by ``held``, and the name that it binds.

    An attribute is detached as it is; a container is made anew, with its non-tensors unchanged. None where a value
    lies in an element of a list that is not itself a container, which may be another object by the next round.
    """
    statement = statement_at(frames[0]) if frames else None
    if statement is None:
        return None
    found: dict[str, str] = {}
    for one in held:
        cut = _cut(statement.source, one)
        if cut is None:
            return None
        found.setdefault(*cut)
    is_dead = not statement.loops and any(dies_with_call(frames[0], name) for name in found)
    if not found or len(found) > _MOST_CUT or is_dead:
        return None
    change = after_round(frames, f"{', '.join(found)} = {', '.join(found.values())}", "detach")
    return None if change is None else (change, tuple(found))


def _cut(source: SourceFile, held: Held) -> tuple[str, str] | None:
    """The name to bind and its detached value."""
    frozen = next((layer.path for layer in held.around if layer.is_frozen), None)
    if frozen is not None:
        cut = object_cut(source, frozen)
        return (cut[0][0], cut[1][0]) if cut is not None and cut[0] == [frozen] else None
    last = max((place for place, layer in enumerate(held.around) if layer.kind == "object"), default=-1)
    layers = held.around[last + 1 :]
    name = layers[0].path if layers else held.path
    if re.search(r"\[\d+\]", name):
        return None
    text = _anew(source, name, layers)
    return None if text is None else (name, text)


def _anew(source: SourceFile, value: str, layers: Sequence[Layer]) -> str | None:
    if not layers:
        return f"{value}.detach()"
    layer, item = layers[0], "s" if len(layers) == 1 else f"part{'_' * (len(layers) - 2)}"
    inner = _anew(source, item, layers[1:])
    wanted = "tensor" if len(layers) == 1 else layers[1].kind
    others = set(layer.items) - {wanted}
    if inner is None:
        return None
    if others == {"none"}:
        inner = f"{item} if {item} is None else {inner}"
    elif others:
        test = _test(source, item, wanted)
        if test is None:
            return None
        inner = f"{inner} if {test} else {item}"
    if layer.kind == "dict":
        return f"{{key: {inner} for key, {item} in {value}.items()}}"
    if layer.kind == "list":
        return f"[{inner} for {item} in {value}]"
    each = f"{inner} for {item} in {value}"
    if layer.kind == "namedtuple":
        return f"{value}._make({each})"
    if layer.kind == "deque":
        made = deque_made(source, value)
        return f"{'type(' + value + ')' if made is None else source.text(made.func)}(({each}), {value}.maxlen)"
    return f"tuple({each})"


def _test(source: SourceFile, item: str, wanted: str) -> str | None:
    """The condition that selects items of the ``wanted`` kind; None where the file has no name for torch."""
    if wanted != "tensor":
        return f"isinstance({item}, {_CLASSES[wanted]})"
    torch = torch_in(source)
    return None if torch is None else f"{torch}.is_tensor({item})"


def torch_in(source: SourceFile) -> str | None:
    """The file's name for torch; None where it has no ``import torch``."""
    imports = (alias for node in source.nodes if isinstance(node, ast.Import) for alias in node.names)
    whole = (one for one in imports if one.name == "torch" or (one.name.startswith("torch.") and not one.asname))
    return next((one.asname or "torch" for one in whole), None)
