"""A state that a module keeps for itself, cut or begun anew from the loop that trains the model it is part of.

The loop cannot name the module (it may be one of many in a ``Sequential``), so it asks all modules of the model.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradsan.model import Diagnosis, Fix, Frame, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.identifiers import chain_key
from gradsan.source.locate import statement_at
from gradsan.source.modules import DETACHED
from gradsan.source.rounds import shape_bound_at
from gradsan.source.tree import SourceFile

_CAUSES = frozenset({"freed_state_carried_over", "state_carried_over"})


@dataclass(frozen=True, slots=True)
class _Kept:
    """``self.<attribute>``, which the statement at ``frame`` binds in ``owner``."""

    attribute: str
    frame: Frame
    owner: ast.ClassDef


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Detach the state of every such module after the round, or call its own method that forgets it before."""
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    bridge = next(iter(blocks.labels(diagnosis, "bridge")), None)
    if diagnosis.cause not in _CAUSES or used is None or bridge is None:
        return ()
    kept = _kept_by(bridge.frame)
    forward = next(
        (pair for label in (bridge, *blocks.labels(diagnosis, "saved")) if (pair := _round(label, used))), None
    )
    if kept is None or forward is None:
        return ()
    first, backward = forward
    model = _model_called(first)
    if model is None:
        return ()
    steps = (blocks.in_one_block(label, used) for label in blocks.labels(diagnosis, "note", "written"))
    ends = [backward, *(pair[0] for pair in steps if pair is not None and pair[0].block is backward.block)]
    found = [_detached(max(ends, key=lambda place: place.index), model, kept)]
    found += [_begun_anew(first, model, kept, name) for name in _forgetting(kept)]
    return tuple(fix for fix in found if fix is not None)


def _kept_by(frame: Frame) -> _Kept | None:
    place = statement_at(frame)
    if place is None or not isinstance(place.node, ast.Assign | ast.AugAssign):
        return None
    owner = place.source.owner_class(place.node)
    targets = place.node.targets if isinstance(place.node, ast.Assign) else [place.node.target]
    names = [one for target in targets for one in ast.walk(target) if _own_attribute(one) is not None]
    attribute = _own_attribute(names[0]) if len(names) == 1 else None
    return None if owner is None or attribute is None else _Kept(attribute, frame, owner)


def _own_attribute(node: ast.AST) -> str | None:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and is_own else None


def _round(label: Label, used: Label) -> tuple[blocks.Placed, blocks.Placed] | None:
    """Where the function that runs backward calls the forward, and that backward, in one block."""
    pair = blocks.in_one_block(label, used)
    return pair if pair is not None and pair[0].index < pair[1].index else None


def _model_called(place: blocks.Placed) -> str | None:
    """The one name or attribute that the statement calls as a model: ``net(…)``, ``self.model.step(…)``."""
    called: list[str] = []
    for node in ast.walk(place.statement):
        if isinstance(node, ast.Call) and node.args:
            key = chain_key(node.func)
            root = (key or "").split(".")[0]
            if key is not None and root.isidentifier() and _is_bound_in_program(place.source, root):
                called.append(key)
    return called[0] if len(set(called)) == 1 else None


def _is_bound_in_program(source: SourceFile, name: str) -> bool:
    """Whether the program gives ``name`` its value: no builtin, no import, no function."""
    bound = {
        one for node in ast.walk(source.module) if isinstance(node, ast.Assign) for one in blocks.names_bound(node)
    }
    arguments = {node.arg for node in ast.walk(source.module) if isinstance(node, ast.arg)}
    return name in bound | arguments


def _detached(last: blocks.Placed, model: str, kept: _Kept) -> Fix | None:
    source = last.source
    if not blocks.is_whole_lines(source, last.statement):
        return None
    module = blocks.fresh_name(source, "module")
    value = f"{module}.{kept.attribute}"
    shape = shape_bound_at(kept.frame, f"self.{kept.attribute}") or "tensor"
    end = source.span(last.statement).end_line
    condition = f"{_is_owner(source, module, kept.owner)} and {value} is not None"
    loop = _loop(last, model, module, condition, f"{value} = {DETACHED[shape].format(value)}")
    lines = blocks.lines_changed(source, {end: f"{source.lines[end - 1]}\n{loop}"})
    return blocks.fix("detach_carried_state", lines, "detach_in_modules", name=value, owner=kept.owner.name)


def _begun_anew(first: blocks.Placed, model: str, kept: _Kept, method: str) -> Fix | None:
    source = first.source
    if not blocks.is_whole_lines(source, first.statement):
        return None
    module = blocks.fresh_name(source, "module")
    start = source.span(first.statement).line
    loop = _loop(first, model, module, _is_owner(source, module, kept.owner), f"{module}.{method}()")
    lines = blocks.lines_changed(source, {start: f"{loop}\n{source.lines[start - 1]}"})
    return blocks.fix("reset_state", lines, "reset_modules", method=method, owner=kept.owner.name)


def _loop(place: blocks.Placed, model: str, module: str, condition: str, body: str) -> str:
    span, unit = place.source.span(place.statement), blocks.indentation_of(place.source)
    indent = place.source.lines[span.line - 1][: span.column - 1]
    return f"{indent}for {module} in {model}.modules():\n{indent}{unit}if {condition}:\n{indent}{unit}{unit}{body}"


def _is_owner(source: SourceFile, module: str, owner: ast.ClassDef) -> str:
    """The test for the class, by its name where the file knows it."""
    known = {
        alias.asname or alias.name
        for node in ast.walk(source.module)
        for alias in getattr(node, "names", ())
        if isinstance(alias, ast.alias)
    }
    known |= {node.name for node in source.module.body if isinstance(node, ast.ClassDef)}
    if owner.name in known:
        return f"isinstance({module}, {owner.name})"
    return f'type({module}).__name__ == "{owner.name}"'


def _forgetting(kept: _Kept) -> list[str]:
    """The class's methods without arguments that bind the state to something that is not made of it."""
    found = []
    for node in kept.owner.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.name == "forward":
            continue
        required = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
        binds = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.Assign) and any(_own_attribute(target) == kept.attribute for target in one.targets)
        ]
        is_fresh = all(_own_attribute(part) != kept.attribute for one in binds for part in ast.walk(one.value))
        if binds and is_fresh and required <= 1 and not node.args.kwonlyargs:
            found.append(node.name)
    return found
