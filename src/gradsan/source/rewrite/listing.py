"""Lists instead of writes: parts stacked where a tensor was filled, loops over elements as comprehensions."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.change import (
    Change,
    Edit,
    augmented_value,
    edited,
    elements_of,
    is_all,
    is_gap,
    is_number,
    may_be_number,
)
from gradsan.source.flow.modules import shape_in_source
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import Binding, bindings_in, binds, leaf_name, local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.out_of_place import chain_value
from gradsan.source.rewrite.rebinding import can_rebind
from gradsan.source.rewrite.scatter import whole_of_part
from gradsan.source.tree import FunctionNode, SourceFile, Span

_KIND = "list_and_stack"
_WIDTH = 120
_CONTAINERS = (ast.Dict, ast.DictComp, ast.List, ast.ListComp)
_MAKING_CONTAINERS = ("dict", "list", "defaultdict", "OrderedDict")


@dataclass(frozen=True, slots=True)
class _Filled:
    """A variable ``name`` whose parts along the dimensions ``dims`` are stored one by one: (1,) for ``x[:, t] = …``.

    (-1,) for ``x[..., t] = …``.
    """

    source: SourceFile
    scope: FunctionNode | ast.Module
    name: str
    dims: tuple[int, ...]
    torch: str


def list_and_stack(frame: Frame) -> Change | None:
    """The lines of the function of ``frame`` in which a tensor is filled, with a list of parts instead.

    ``frame`` stands at a ``x[:, t] = …`` within a loop. Where ``x`` is made, it is split (``unbind``); parts are
    stored in and read from the list, and ``torch.stack`` makes a tensor of it where the whole of ``x`` is used. None
    where ``x`` is made in several places, its parts are stored in more than one way, or a use is not understood.
    """
    filled = _filled_at(frame)
    if filled is None:
        return None
    edits: list[Edit] = []
    makers = 0
    for node in _occurrences(filled):
        is_maker = isinstance(node.ctx, ast.Store)
        makers += is_maker
        found = _made(filled, node) if is_maker else _used(filled, node)
        if found is None:
            return None
        edits += found
    return edited(filled.source, edits, _KIND) if makers == 1 else None


def _filled_at(frame: Frame) -> _Filled | None:
    statement = statement_at(frame)
    if statement is None or not statement.loops:
        return None
    source, node = statement.source, statement.node
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    if isinstance(node, ast.AugAssign):
        target = node.target
    torch = torch_name(source)
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return None
    elements = elements_of(target)
    is_last = _is_of_last(elements)
    dims = (-1,) if is_last else tuple(place for place, one in enumerate(elements) if not is_all(one))
    is_plain = is_last or (len(dims) == 1 and dims[0] == len(elements) - 1)
    if not (is_plain or dims == (0, 1) == tuple(range(len(elements)))):
        return None
    if not all(may_be_number(elements[place]) for place in dims):
        return None
    function = statement.function
    if isinstance(function, ast.Lambda):
        return None
    return _Filled(source, source.module if function is None else function, target.value.id, dims, torch)


def _is_of_last(elements: list[ast.expr]) -> bool:
    """Whether the index is ``..., t``."""
    return len(elements) == 2 and isinstance(elements[0], ast.Constant) and elements[0].value is Ellipsis


def _occurrences(filled: _Filled) -> Iterator[ast.Name]:
    own = set(local_nodes(filled.scope))
    for node in ast.walk(filled.scope):
        if isinstance(node, ast.Name) and node.id == filled.name:
            function = filled.source.function(node)
            if node in own or function is filled.scope or not binds(function, filled.name):
                yield node


def _made(filled: _Filled, node: ast.Name) -> list[Edit] | None:
    """The edits of the tensor's definition, whose value becomes the list of its parts."""
    statement, field = filled.source.parents[node]
    if not isinstance(statement, ast.Assign) or field != "targets" or len(statement.targets) != 1:
        return None
    value = statement.value
    if _makes_container(value):
        return None
    span = filled.source.span(value)
    if len(filled.dims) == 2:
        return _on_a_line_of_its_own(filled, statement, f"[list(part.unbind()) for part in {filled.name}.unbind()]")
    unbind = f".unbind({filled.dims[0] or ''})"
    is_called = isinstance(value, ast.Call | ast.Name | ast.Attribute | ast.Subscript)
    head, tail = ("list(", f"{unbind})") if is_called else ("list((", f"){unbind})")
    if len(filled.source.lines[span.line - 1]) + len(head) + len(tail) > _WIDTH:
        return _on_a_line_of_its_own(filled, statement, f"list({filled.name}{unbind})")
    return [Edit.before(span, head), Edit.after(span, tail)]


def _makes_container(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp):
        return _makes_container(value.left) or _makes_container(value.right)  # [None] * n
    return isinstance(value, _CONTAINERS) or (
        isinstance(value, ast.Call) and leaf_name(value.func) in _MAKING_CONTAINERS
    )


def _on_a_line_of_its_own(filled: _Filled, statement: ast.stmt, value: str) -> list[Edit] | None:
    span = filled.source.span(statement)
    indent = filled.source.indent(span)
    after = filled.source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    if indent.strip() or (after and not after.startswith("#")):
        return None
    end = len(filled.source.lines[span.end_line - 1]) + 1
    return [Edit.insert(span.end_line, end, f"\n{indent}{filled.name} = {value}")]


def _used(filled: _Filled, node: ast.Name) -> list[Edit] | None:
    parent, field = filled.source.parents[node]
    if isinstance(parent, ast.Subscript) and field == "value":
        return _part(filled, node, parent)
    size = _size(filled, node)
    if size is not None:
        return [size]
    if isinstance(parent, ast.Delete) or not isinstance(node.ctx, ast.Load):
        return None
    if isinstance(parent, ast.For) and field == "iter" and filled.dims == (0,):
        return []
    span = filled.source.span(node)
    return [Edit(span, _whole(filled, filled.name))]


def _whole(filled: _Filled, text: str) -> str:
    if len(filled.dims) == 2:
        return f"{filled.torch}.stack([{filled.torch}.stack(part) for part in {text}])"
    dim = filled.dims[0]
    return f"{filled.torch}.stack({text}, {dim})" if dim else f"{filled.torch}.stack({text})"


def _part(filled: _Filled, node: ast.Name, part: ast.Subscript) -> list[Edit] | None:
    """``x[:, t]`` is the list's element ``x[t]``; a slice of the list is stacked."""
    elements = elements_of(part)
    if filled.dims == (-1,):
        elements = [ast.Slice(), elements[1]] if _is_of_last(elements) else []
    leading = abs(filled.dims[0])
    reached = elements[leading : leading + len(filled.dims)]
    if not all(map(is_all, elements[:leading])) or not reached or any(map(is_gap, elements)):
        return None
    rest = elements[leading + len(reached) :]
    is_stored = not isinstance(part.ctx, ast.Load)
    numbers = [one for one in reached if not isinstance(one, ast.Slice)]
    if not all(map(may_be_number, numbers)) or (is_stored and (rest or len(numbers) < len(filled.dims))):
        return None
    if len(numbers) < len(reached) or len(reached) < len(filled.dims):
        return _several(filled, part, elements)
    edits = _brackets(filled.source, node, part, reached, rest, leading)
    statement = filled.source.parents[part][0]
    if isinstance(statement, ast.AugAssign) and statement.target is part:
        return None if edits is None else _augmented(filled, statement, reached)
    if edits is not None and is_stored and isinstance(statement, ast.Assign) and is_number(statement.value):
        # A number assigned to a tensor fills all its elements; a list would store the number itself.
        value = filled.source.span(statement.value)
        old = f"{filled.name}{''.join(f'[{filled.source.text(one)}]' for one in reached)}"
        edits.append(Edit(value, f"{filled.torch}.full_like({old}, {filled.source.slice(value)})"))
    return edits


def _several(filled: _Filled, part: ast.Subscript, elements: list[ast.expr]) -> list[Edit] | None:
    source = filled.source
    if any(isinstance(inner, ast.Name) and inner.id == filled.name for one in elements for inner in ast.walk(one)):
        return None
    if len(elements) != abs(filled.dims[0]) + 1:
        return None
    if len(filled.dims) == 2:
        if isinstance(elements[0], ast.Slice):
            return None
        row = f"{filled.name}[{source.text(elements[0])}]"
        return [Edit(source.span(part), f"{filled.torch}.stack({row})")]
    chosen = source.slice(source.span(elements[-1]))
    return [Edit(source.span(part), _whole(filled, f"{filled.name}[{chosen}]"))]


def _brackets(
    source: SourceFile,
    node: ast.Name,
    part: ast.Subscript,
    reached: list[ast.expr],
    rest: list[ast.expr],
    leading: int,
) -> list[Edit] | None:
    """The edits of the brackets and commas around the numbers, which leave the text between them as it is."""
    spans = [source.span(one) for one in (*reached, *rest)]
    whole = source.span(part)
    name = source.span(node)
    edits = [Edit(_between(name, spans[0]), "[")]
    for before, after in itertools.pairwise(spans[: len(reached)]):
        edits.append(Edit(_between(before, after), "]["))
    last = spans[len(reached) - 1]
    if rest:
        edits.append(Edit(_between(last, spans[len(reached)]), f"][{':, ' * leading}"))
    else:
        edits.append(Edit(Span(last.end_line, last.end_column, whole.end_line, whole.end_column), "]"))
    if any(source.slice(edit.span).strip("[]:., \t\n") for edit in edits):
        return None
    return [edit for edit in edits if source.slice(edit.span) != edit.text]


def _augmented(filled: _Filled, statement: ast.AugAssign, reached: list[ast.expr]) -> list[Edit] | None:
    """The edits of ``x[t] += v``, rebound because the stored part would be written in place."""
    source = filled.source
    inner = [*ast.walk(statement.value), *(node for one in reached for node in ast.walk(one))]
    if any(isinstance(node, ast.Name) and node.id == filled.name for node in inner):
        return None
    span, target = source.span(statement), source.span(statement.target)
    rest = source.slice(Span(target.end_line, target.end_column, span.end_line, span.end_column))
    sign, _, value = rest.partition("=")
    part = f"{filled.name}{''.join(f'[{source.text(one)}]' for one in reached)}"
    simple = isinstance(statement.value, ast.Name | ast.Call | ast.Attribute | ast.Constant | ast.Subscript)
    value = value.strip() if simple else f"({value.strip()})"
    return [Edit(span, f"{part} = {part} {sign.strip()} {value}")]


def _size(filled: _Filled, node: ast.Name) -> Edit | None:
    """The edits of ``x.size(1)``, ``x.shape[1]``, ``len(x)``: sizes of the list and its elements."""
    source = filled.source
    parent, field = source.parents[node]
    outer = source.parents[parent][0] if parent in source.parents else None
    dim: int | None = None
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "len":
        dim, outer = 0, parent
    elif isinstance(parent, ast.Attribute) and field == "value":
        argument: ast.expr | None = None
        if parent.attr == "size" and isinstance(outer, ast.Call) and len(outer.args) == 1 and not outer.keywords:
            argument = outer.args[0]
        elif parent.attr == "shape" and isinstance(outer, ast.Subscript):
            argument = outer.slice
        dim = argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, int) else None
        if parent.attr in ("device", "dtype"):
            element = filled.name + "[0]" * len(filled.dims)
            return Edit(source.span(node), element)
    if dim is None or not isinstance(outer, ast.expr) or filled.dims == (-1,):
        return None
    if dim in filled.dims:
        return Edit(source.span(outer), f"len({filled.name}{'[0]' * filled.dims.index(dim)})")
    fewer = sum(one < dim for one in filled.dims)
    return Edit(source.span(outer), f"{filled.name}{'[0]' * len(filled.dims)}.size({dim - fewer})")


def _between(before: Span, after: Span) -> Span:
    return Span(before.end_line, before.end_column, after.line, after.column)


def rebuilt_list(frame: Frame, op: str, are_results: bool = False) -> Change | None:
    """``for w, g in zip(fast, grads): w -= g`` as ``fast = [w - g for w, g in zip(fast, grads)]``.

    Only where the loop does nothing else, and its elements are results of a computation: the parameters of a module
    are referenced from elsewhere, too. The run knows (``are_results``), or the function has computed them itself.
    """
    found = target_at(frame, op)
    if found is None or not isinstance(found[1].node, ast.Name):
        return None
    source, statement, name = found[0].source, found[0].statement, found[1].node.id
    loop = _loop_of(source, statement, found[0].node)
    value = _value(source, statement, found[0].node)
    if loop is None:
        return None if value is None else _by_key(source, statement, name, value, are_results)
    walked = _walked(loop.target, loop.iter, name)
    if value is None or walked is None:
        return None
    variable, kept = walked
    of_dict = isinstance(kept, ast.Call)
    whole = kept.func.value if isinstance(kept, ast.Call) and isinstance(kept.func, ast.Attribute) else kept
    if not isinstance(whole, ast.Name) or not can_rebind(source, whole):
        return None
    bindings = _bindings(source, loop, whole.id)
    if not _are_computed(bindings) and not (are_results and _is_taken_up(source, loop, whole.id)):
        return None
    head, iterated = source.text(loop.target), source.text(loop.iter)
    if isinstance(variable, ast.Tuple):
        text = f"{whole.id} = {{{source.text(variable.elts[0])}: {value} for {head} in {iterated}}}"
    elif of_dict:
        key = "key" if "key" not in (head + iterated + value) else "key_"
        at, around = source.span(variable), source.span(loop.target)
        start, end = at.column - around.column, at.end_column - around.column
        pair = f"({key}, {name})" if isinstance(loop.target, ast.Tuple) else f"{key}, {name}"
        head = head[:start] + pair + head[end:]
        iterated = iterated.replace(source.text(kept), f"{whole.id}.items()")
        text = f"{whole.id} = {{{key}: {value} for {head} in {iterated}}}"
    else:
        is_tuple = any(shape_in_source(source, one) == "tuple" for one in bindings)
        made = "tuple({})" if is_tuple else "[{}]"
        text = f"{whole.id} = {made.format(f'{value} for {head} in {iterated}')}"
    whole_of_loop = source.span(statement if isinstance(loop, ast.comprehension) else loop)
    return edited(source, [Edit(whole_of_loop, text)], "out_of_place")


def _by_key(source: SourceFile, statement: ast.stmt, name: str, value: str, are_results: bool) -> Change | None:
    """``fast[n] = p - g`` for ``p -= g``, one of several statements of ``for n, p in fast.items()``, or of a list."""
    loop, _ = source.parents[statement]
    if not isinstance(loop, ast.For) or statement not in loop.body:
        return None
    walked = _walked(loop.target, loop.iter, name)
    if walked is None or not isinstance(walked[0], ast.Tuple) or not isinstance(walked[1], ast.Call):
        return None
    items, key = walked[1].func, walked[0].elts[0]
    whole = items.value if isinstance(items, ast.Attribute) else None
    if not isinstance(whole, ast.Name) or not isinstance(key, ast.Name):
        return None
    if not _are_computed(_bindings(source, loop, whole.id)) and not (
        are_results and _is_taken_up(source, loop, whole.id)
    ):
        return None
    later = [node for one in loop.body[loop.body.index(statement) + 1 :] for node in ast.walk(one)]
    is_read = any(isinstance(node, ast.Name) and node.id == name for node in later)
    text = f"{name} = {whole.id}[{key.id}] = {value}" if is_read else f"{whole.id}[{key.id}] = {value}"
    return edited(source, [Edit(source.span(statement), text)], "out_of_place")


def _loop_of(source: SourceFile, statement: ast.stmt, node: ast.AST) -> ast.For | ast.comprehension | None:
    """The loop that consists of ``statement`` alone; for a bare ``[w.sub_(g) for w, g in …]`` its ``for``."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.ListComp):
        generators = statement.value.generators
        is_plain = len(generators) == 1 and not generators[0].ifs and not generators[0].is_async
        return generators[0] if is_plain and node in ast.walk(statement.value.elt) else None
    loop = source.parents.get(statement, (None, ""))[0]
    is_alone = isinstance(loop, ast.For) and loop.body == [statement] and not loop.orelse
    return loop if isinstance(loop, ast.For) and is_alone else None


def _value(source: SourceFile, statement: ast.stmt, node: ast.AST) -> str | None:
    part = whole_of_part(source, statement, node)
    if part is not None:
        return part
    if isinstance(statement, ast.AugAssign):
        return augmented_value(source, statement)
    chain = chain_value(source, node) if isinstance(statement, ast.Expr) and isinstance(node, ast.Call) else None
    if chain is None or not isinstance(statement, ast.Expr):
        return None
    whole = statement.value.elt if isinstance(statement.value, ast.ListComp) else statement.value
    return chain[1] if chain[0] is whole else None


def _is_taken_up(source: SourceFile, loop: ast.AST, name: str) -> bool:
    """Whether ``name`` is read outside of the loop and gradient calls; a list that is not is no module's parameters."""
    function = source.function(loop)
    own = set(ast.walk(loop))
    for node in local_nodes(source.module if function is None else function):
        if not isinstance(node, ast.Name) or node.id != name or not isinstance(node.ctx, ast.Load) or node in own:
            continue
        around = [one for one, _ in source.ancestors(node) if isinstance(one, ast.Call)]
        if not any(leaf_name(one.func) == "grad" for one in around):
            return True
    return False


def _walked(target: ast.expr, walked: ast.expr, name: str) -> tuple[ast.Name | ast.Tuple, ast.expr] | None:
    """The variable ``name`` and the iterable of its elements: ``fast``, ``fast.values()``; for ``fast.items()`` both
    variables.
    """
    is_items = isinstance(walked, ast.Call) and leaf_name(walked.func) == "items" and not walked.args
    if is_items and isinstance(target, ast.Tuple) and [leaf_name(one) for one in target.elts[1:]] == [name]:
        return target, walked
    if isinstance(target, ast.Name) and target.id == name:
        function = walked.func if isinstance(walked, ast.Call) and not walked.args else None
        is_values = isinstance(function, ast.Attribute) and function.attr == "values"
        return (target, walked) if isinstance(walked, ast.Name) or is_values else None
    if not isinstance(target, ast.Tuple) or not isinstance(walked, ast.Call) or walked.keywords:
        return None
    if not isinstance(walked.func, ast.Name) or walked.func.id != "zip" or len(walked.args) != len(target.elts):
        return None
    found = [_walked(one, value, name) for one, value in zip(target.elts, walked.args, strict=True)]
    return next((one for one in found if one is not None), None)


def _bindings(source: SourceFile, loop: ast.For | ast.comprehension, name: str) -> list[Binding]:
    """The bindings of ``name`` in the function of the loop."""
    scope = source.function(loop)
    return bindings_in(local_nodes(scope) if scope is not None else source.nodes, name)


def _are_computed(bindings: list[Binding]) -> bool:
    """Whether the list or dict is built from new values each time: ``[p.clone() for …]``."""
    values = [one.value for one in bindings]
    made = [one.value if isinstance(one, ast.DictComp) else getattr(one, "elt", None) for one in values]
    return bool(made) and all(isinstance(one, ast.Call | ast.BinOp) for one in made)
