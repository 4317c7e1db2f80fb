"""States and buffers of modules: detached from the round before, or replaced instead of written.

The loop cannot name the module (it may be one of many in a ``Sequential``): it iterates over all of the model.

The usual shape: the statistics of one network are copied into another, or averaged with them, in a loop over
``net.buffers()``. The loop has only the tensors; each new tensor is set on the module by its name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsan.diagnose.names import shared_level
from gradsan.model import Diagnosis, Fix, Frame, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes._kept_parts import own_attribute
from gradsan.source.change import Edit, apply_change, changed_lines, indentation_of, text_with
from gradsan.source.flow.modules import DETACHED, Shape, object_cut
from gradsan.source.flow.rounds import in_same_function, shape_bound_at
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import bindings_of, chain_key, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import statement_at
from gradsan.source.methods import ADDING, is_inplace_method
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.suggest import detach_at
from gradsan.source.tree import FunctionNode, SourceFile, Span

_CAUSES = frozenset({"freed_state_carried_over", "state_carried_over"})


@dataclass(frozen=True, slots=True)
class _Kept:
    """``self.<attribute>``, which the statement at ``frame`` binds in ``owner``.

    ``others`` are the attributes that the same method reads and then binds, too: other states that it carries.
    """

    attribute: str
    frame: Frame
    owner: ast.ClassDef
    others: tuple[str, ...] = ()


def state_in_module(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Detach the state of every such module after the round, or call its own reset method before it."""
    used = blocks.first(diagnosis, "used")
    bridge = blocks.first(diagnosis, "bridge")
    if diagnosis.cause not in _CAUSES or used is None or bridge is None:
        return ()
    kept = _kept_by(bridge.frame)
    forward = next(
        (pair for label in (bridge, *blocks.labels(diagnosis, "saved")) if (pair := _round(label, used))), None
    )
    if kept is None or forward is None:
        return ()
    first, backward = forward
    model = _model_called(first, kept)
    if model is None:
        return ()
    steps = (blocks.in_one_block(label, used) for label in blocks.labels(diagnosis, "note", "written"))
    ends = [backward, *(pair[0] for pair in steps if pair is not None and pair[0].block is backward.block)]
    found = [_detached(max(ends, key=lambda place: place.index), model, kept)]
    found += [_begun_anew(first, model, kept, name) for name in _forgetting(kept)]
    return tuple(fix for fix in found if fix is not None)


def cut_where_bound(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Detach the state in the statement that binds it, where a line after the round leaves what hangs on it attached.

    A buffer into which each round writes the state, though only some run a backward.
    """
    bridge, used = blocks.first(diagnosis, "bridge"), blocks.first(diagnosis, "used")
    name = None if bridge is None else bridge.message.values.get("bridge")
    if diagnosis.cause not in _CAUSES or bridge is None or used is None or not isinstance(name, str):
        return ()
    bound, walked = statement_at(bridge.frame), statement_at(used.frame)
    if _repeats_in_round(diagnosis, bridge.frame, blocks.user_frames(used)):
        return ()
    known = any(fix.kind == "detach_carried_state" and fix.lines for fix in diagnosis.fixes)
    if not known or bound is None or walked is None or not set(bound.loops) <= set(walked.loops):
        return ()  # a loop of its own is a part of the round, through which its loss is to reach
    lines = changed_lines(bridge.frame.file, detach_at(bridge.frame, name))
    return (Fix.worded("help.detach_carried_state", {"bridge": name}, lines),) if lines else ()


def _repeats_in_round(diagnosis: Diagnosis, bound_at: Frame, walked: Sequence[Frame]) -> bool:
    """Whether a loop of a function that the round calls binds the state several times before its backward."""
    for label in blocks.labels(diagnosis, "bridge", "saved"):
        stack = blocks.user_frames(label)
        places = [statement_at(one) for one in stack[shared_level(stack, walked) + 1 :]]
        is_of_binding = any(in_same_function(one, bound_at) for one in stack)
        if is_of_binding and any(one is not None and one.loops for one in places):
            return True
    return False


def _kept_by(frame: Frame) -> _Kept | None:
    if (place := statement_at(frame)) is None:
        return None
    node, owner = place.node, place.source.owner_class(place.node)
    targets: list[ast.expr] = [node.target] if isinstance(node, ast.AugAssign) else []
    targets = node.targets if isinstance(node, ast.Assign) else targets
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    targets = [called] if isinstance(called, ast.Attribute) and is_inplace_method(called.attr) else targets
    names = [one for target in targets for one in ast.walk(target) if own_attribute(one) is not None]
    attribute = own_attribute(names[0]) if len(names) == 1 else None
    # A class without a base is no module, which another one could list.
    if owner is None or attribute is None or not owner.bases:
        return None
    return _Kept(attribute, frame, owner, tuple(one for one in _carried(place.function) if one != attribute))


def _carried(function: FunctionNode | None) -> list[str]:
    """The attributes of ``self`` that a method reads before it binds them."""
    read: dict[str, tuple[int, int]] = {}
    bound: dict[str, tuple[int, int]] = {}
    for node in local_nodes(function) if isinstance(function, ast.FunctionDef) else ():
        attribute = own_attribute(node)
        if attribute is not None and isinstance(node, ast.Attribute):
            known, at = (read if isinstance(node.ctx, ast.Load) else bound), (node.lineno, node.col_offset)
            known[attribute] = min(known.get(attribute, at), at)
    return sorted(name for name, at in bound.items() if name in read and read[name][0] <= at[0])


def _round(label: Label, used: Label) -> tuple[blocks.Placed, blocks.Placed] | None:
    """The statements that call the forward and the backward, in this order, in one block of the training function."""
    pair = blocks.in_one_block(label, used)
    return pair if pair is not None and pair[0].index < pair[1].index else None


def _model_called(place: blocks.Placed, kept: _Kept) -> str | None:
    """The one name or attribute that the statement calls as a model: ``net`` of ``net(…)`` and ``net.step(…)``."""
    classes = [one for one in place.source.nodes if isinstance(one, ast.ClassDef)]
    methods = {one.name for owner in (*classes, kept.owner) for one in owner.body if isinstance(one, ast.FunctionDef)}
    called: list[str] = []
    for node in ast.walk(place.statement):
        if isinstance(node, ast.Call) and node.args:
            key = chain_key(node.func)
            root = (key or "").split(".")[0]
            if key is not None and root.isidentifier() and _is_bound_in_program(place.source, root):
                owner, _, name = key.rpartition(".")
                if owner and name in ADDING - methods:
                    continue  # a list of what the steps returned
                called.append(owner if owner and name in methods else key)
    return called[0] if len(set(called)) == 1 else None


def _is_bound_in_program(source: SourceFile, name: str) -> bool:
    """Whether the program binds ``name`` to a value: no builtin, import or function."""
    bound = {one for node in source.nodes if isinstance(node, ast.Assign) for one in blocks.names_bound(node)}
    arguments = {node.arg for node in source.nodes if isinstance(node, ast.arg)}
    return name in bound | arguments


def _shape(kept: _Kept) -> Shape | None:
    """The kind of value that the attribute holds; None for a container of a kind that no line detaches."""
    place, name = statement_at(kept.frame), f"self.{kept.attribute}"
    bound = [] if place is None else [one.name for one in bindings_of(place.node) if one.name.startswith(f"{name}[")]
    if not bound:
        return shape_bound_at(kept.frame, name) or "tensor"
    part = shape_bound_at(kept.frame, bound[0]) or "tensor"
    found = "dict" if part == "tensor" else f"dict/{part}"
    return next((one for one in DETACHED if one == found), None) if bound[0].endswith(("']", '"]')) else None


def _detached(last: blocks.Placed, model: str, kept: _Kept) -> Fix | None:
    source = last.source
    if not is_whole_lines(source, last.statement):
        return None
    module = blocks.fresh_name(source, "module")
    value = f"{module}.{kept.attribute}"
    shape = _shape(kept)
    end = source.span(last.statement).end_line
    condition = f"{_is_owner(source, module, kept.owner)} and {value} is not None"
    cut = object_cut(source, value) if shape == "object" else None
    cut = ([value], [DETACHED[shape].format(value)]) if shape in DETACHED else cut
    if cut is None:
        return None
    body, torch = f"{', '.join(cut[0])} = {', '.join(cut[1])}", torch_name(source)
    if kept.others and shape == "tensor":
        condition = _is_owner(source, module, kept.owner)
        names = sorted((kept.attribute, *kept.others))
        body = "\n".join(
            f"if {torch}.is_tensor({module}.{one}):\n\t{module}.{one} = {module}.{one}.detach()" for one in names
        )
        value = ", ".join(f"{module}.{one}" for one in names)
    if (own := blocks.only_module(source, model, kept.owner.name)) is not None and not kept.others:
        loop = source.indent(source.span(last.statement)) + re.sub(rf"\b{module}\.", f"{own}.", body)
        value = f"{own}.{kept.attribute}"
    else:
        loop = _loop(last, model, module, condition, body)
    lines = blocks.lines_changed(source, {end: f"{source.lines[end - 1]}\n{loop}"})
    return blocks.fix("detach_carried_state", lines, "detach_in_modules", name=value, owner=kept.owner.name)


def _begun_anew(first: blocks.Placed, model: str, kept: _Kept, method: str) -> Fix | None:
    source = first.source
    if not is_whole_lines(source, first.statement):
        return None
    module = blocks.fresh_name(source, "module")
    start = source.span(first.statement).line
    own = blocks.only_module(source, model, kept.owner.name)
    if own is not None:
        loop = f"{source.indent(source.span(first.statement))}{own}.{method}()"
    else:
        loop = _loop(first, model, module, _is_owner(source, module, kept.owner), f"{module}.{method}()")
    lines = blocks.lines_changed(source, {start: f"{loop}\n{source.lines[start - 1]}"})
    return blocks.fix("reset_state", lines, "reset_modules", method=method, owner=kept.owner.name)


def _loop(place: blocks.Placed, model: str, module: str, condition: str, body: str) -> str:
    span, unit = place.source.span(place.statement), indentation_of(place.source)
    indent = place.source.indent(span)
    inner = "\n".join(f"{indent}{unit}{unit}{line}" for line in body.replace("\t", unit).split("\n"))
    return f"{indent}for {module} in {model}.modules():\n{indent}{unit}if {condition}:\n{inner}"


def _is_owner(source: SourceFile, module: str, owner: ast.ClassDef) -> str:
    """The test for the class, by its name where the file knows it."""
    known = {
        alias.asname or alias.name
        for node in source.nodes
        for alias in getattr(node, "names", ())
        if isinstance(alias, ast.alias)
    }
    known |= {node.name for node in source.nodes if isinstance(node, ast.ClassDef)}
    if owner.name in known:
        return f"isinstance({module}, {owner.name})"
    return f'type({module}).__name__ == "{owner.name}"'


def _forgetting(kept: _Kept) -> list[str]:
    """The class's methods without arguments that rebind the state to a value not computed from it."""
    found = []
    for node in kept.owner.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.name == "forward":
            continue
        if node.lineno <= kept.frame.line <= (node.end_lineno or 0):
            continue  # the round itself binds it there
        required = len(node.args.posonlyargs + node.args.args) - len(node.args.defaults)
        binds = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.Assign) and any(own_attribute(target) == kept.attribute for target in one.targets)
        ]
        is_fresh = all(own_attribute(part) != kept.attribute for one in binds for part in ast.walk(one.value))
        if binds and is_fresh and required <= 1 and not node.args.kwonlyargs:
            found.append(node.name)
    return found


@dataclass(frozen=True, slots=True)
class _Walk:
    """A loop or comprehension in which ``variable``, a part of its target, iterates over the buffers of ``module``.

    ``call`` is ``module.buffers()``, or ``module.named_buffers()`` with ``key`` as the variable of the names.
    """

    variable: ast.Name
    call: ast.Call
    module: ast.expr
    key: ast.Name | None = None


def renew_buffers(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Compute each buffer out of place in the loop that writes them, and set it on its module."""
    written = blocks.labels(diagnosis, "written")
    if diagnosis.cause in blocks.STEPPED or not written:
        return ()
    loops = {loop for label in written for loop in _loop_of(label)}
    first = statement_at(written[0].frame)
    if len(loops) != 1 or first is None:
        return ()
    source, (loop, name) = first.source, loops.pop()
    new = _written_anew(source, loop, written)
    if not new:
        return ()
    walk = next((one for one in _walks(loop.target, loop.iter) if one.variable.id == name), None)
    changes = _directly(source, loop, walk, new) if walk is not None else _through_a_list(source, loop, name, new)
    return (blocks.fix("out_of_place", blocks.lines_changed(source, changes), "renew_buffers"),) if changes else ()


def _loop_of(label: Label) -> Iterator[tuple[ast.For, str]]:
    """The loop whose variable the label's operation writes, and the variable's name."""
    place, target = statement_at(label.frame), target_at(label.frame, label.op or "")
    if place is None or target is None or not isinstance(target[1].node, ast.Name) or not place.loops:
        return
    loop = place.loops[-1]
    if isinstance(loop, ast.For) and place.node in loop.body:
        yield loop, target[1].node.id


def _written_anew(source: SourceFile, loop: ast.For, written: tuple[Label, ...]) -> dict[ast.stmt, str]:
    """The loop's writing statements with their new text; empty where one has no out-of-place counterpart."""
    found: dict[ast.stmt, str] = {}
    for label in written:
        place, change = statement_at(label.frame), out_of_place(label.frame, label.op or "")
        if place is None or change is None or not is_whole_lines(source, place.node):
            return {}
        span = source.span(place.node)
        lines = apply_change("\n".join(source.lines), change).split("\n")
        added = len(lines) - len(source.lines)
        found[place.node] = "\n".join(lines[span.line - 1 : span.end_line + added])
    return {node: found[node] for node in loop.body if node in found}


def _walks(target: ast.expr, walked: ast.expr) -> Iterator[_Walk]:
    """The variables of ``for target in walked`` that iterate over buffers of a module."""
    if not isinstance(walked, ast.Call) or walked.keywords:
        return
    function, elements = walked.func, target.elts if isinstance(target, ast.Tuple) else []
    if isinstance(function, ast.Attribute) and not walked.args and chain_key(function.value) is not None:
        if function.attr == "buffers" and isinstance(target, ast.Name):
            yield _Walk(target, walked, function.value)
        if function.attr == "named_buffers" and len(elements) == 2:
            key, variable = elements
            if isinstance(key, ast.Name) and isinstance(variable, ast.Name):
                yield _Walk(variable, walked, function.value, key)
    elif isinstance(function, ast.Name) and function.id == "zip" and len(elements) == len(walked.args):
        for one, value in zip(elements, walked.args, strict=True):
            yield from _walks(one, value)
    elif isinstance(function, ast.Name) and function.id == "enumerate" and len(elements) == 2 and len(walked.args) == 1:
        yield from _walks(elements[1], walked.args[0])


def _named(source: SourceFile, walk: _Walk) -> tuple[str, list[Edit]]:
    """The variable for the names of the buffers, and the edits that introduce it."""
    if walk.key is not None:
        return walk.key.id, []
    key = blocks.fresh_name(source, "name")
    assert isinstance(walk.call.func, ast.Attribute)
    method, variable = source.span(walk.call.func), source.span(walk.variable)
    at = method.end_column - len("buffers")
    # A single variable (`for a in …`) needs no parentheses, but allows them.
    return key, [
        Edit(Span(method.end_line, at, method.end_line, method.end_column), "named_buffers"),
        Edit(variable, f"({key}, {walk.variable.id})"),
    ]


def _directly(source: SourceFile, loop: ast.For, walk: _Walk, new: dict[ast.stmt, str]) -> dict[int, str]:
    """The edits for ``for a in net.buffers()``, which then iterates over the names as well."""
    key, edits = _named(source, walk)
    changes = _with_edits(source, source.span(loop).line, source.span(loop.iter).end_line, edits)
    return changes | _given(source, new, source.text(walk.module), key, walk.variable.id)


def _through_a_list(source: SourceFile, loop: ast.For, name: str, new: dict[ast.stmt, str]) -> dict[int, str]:
    """The edits for ``for a, b in self.pairs``, a list of buffers made earlier, which then holds modules and names."""
    made = _made_before(source, loop)
    variables = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
    if made is None:
        return {}
    parts = made.elt.elts if isinstance(made.elt, ast.Tuple) else [made.elt]
    places = [place for place, one in enumerate(variables) if isinstance(one, ast.Name) and one.id == name]
    if len(parts) != len(variables) or len(places) != 1:
        return {}
    part, variable = parts[places[0]], variables[places[0]]
    found = (walk for one in made.generators for walk in _walks(one.target, one.iter))
    walk = next((one for one in found if isinstance(part, ast.Name) and one.variable.id == part.id), None)
    if walk is None:
        return {}
    owner, place_name = blocks.fresh_name(source, "owner"), blocks.fresh_name(source, "place")
    key, edits = _named(source, walk)
    edits.append(Edit(source.span(part), f"({source.text(walk.module)}, {key})"))
    whole = source.span(made)
    changes = _with_edits(source, whole.line, whole.end_line, edits)
    head = _with_edits(
        source,
        source.span(loop).line,
        source.span(loop.iter).end_line,
        [Edit(source.span(variable), f"({owner}, {place_name})")],
    )
    if changes.keys() & head.keys():
        return {}
    changes |= head | _given(source, new, owner, place_name, name)
    line = source.span(loop.body[0]).line
    read = f"{source.indent(loop.body[0])}{name} = {owner}.get_buffer({place_name})"
    changes[line] = f"{read}\n{changes.get(line, source.lines[line - 1])}"
    return changes


def _made_before(source: SourceFile, loop: ast.For) -> ast.ListComp | None:
    """The list comprehension that defines the iterated name, where nothing else binds or reads that name."""
    key = chain_key(loop.iter)
    others = [
        node
        for node in source.nodes
        if isinstance(node, ast.Name | ast.Attribute) and chain_key(node) == key and node is not loop.iter
    ]
    if key is None or len(others) != 1 or source.owner_class(others[0]) is not source.owner_class(loop):
        return None
    statement = source.parents[others[0]][0]
    if not isinstance(statement, ast.Assign) or statement.targets != others:
        return None
    return statement.value if isinstance(statement.value, ast.ListComp) else None


def _given(source: SourceFile, new: dict[ast.stmt, str], module: str, key: str, variable: str) -> dict[int, str]:
    """The out-of-place writes, and after the last of them the line that sets the buffer on its module."""
    changes: dict[int, str] = {}
    for node, text in new.items():
        span = source.span(node)
        changes |= blocks.removed(source, node)
        changes[span.line] = text
    last = source.span(list(new)[-1])
    indent = source.indent(last)
    owner = f'{module}.get_submodule({key}.rpartition(".")[0])'
    changes[last.line] += f'\n{indent}setattr({owner}, {key}.rpartition(".")[2], {variable})'
    return changes


def _with_edits(source: SourceFile, first: int, last: int, edits: list[Edit]) -> dict[int, str]:
    whole = Span(first, 1, last, len(source.lines[last - 1]) + 1)
    return {**dict.fromkeys(range(first, last + 1), ""), first: text_with(source, whole, edits)}
