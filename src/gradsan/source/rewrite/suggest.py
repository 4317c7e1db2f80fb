"""Lines that copy or detach a value, or undo a detach; keywords removed or set to False."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from gradsan.model import Frame, Lines
from gradsan.source.change import (
    TAKES_A_METHOD_CALL,
    Change,
    Edit,
    edited,
    edited_lines,
    followed,
    insert_after,
    insert_before,
    without_keyword,
)
from gradsan.source.flow.modules import (
    DETACHED,
    Shape,
    constructors,
    detached_form,
    in_place_argument,
    object_cut,
    shape_in_source,
)
from gradsan.source.flow.targets import target_at
from gradsan.source.identifiers import (
    Binding,
    assigned_names,
    bindings_in,
    bindings_of,
    binds,
    chain_key,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Statement, expressions_at, statement_at, statements_at
from gradsan.source.methods import ADDING, KEEPS_SEVERAL
from gradsan.source.rewrite.copied import clone_for_second_name, cloned, computes_with, value_and_clone
from gradsan.source.rewrite.rebinding import can_rebind, notes_on_rebinding
from gradsan.source.tree import SourceFile, Span, header_nodes

_Found = TypeVar("_Found")
_STORING_METHODS = frozenset({"copy_", "index_copy_", "masked_scatter_", "put_"})


def clone_before(frame: Frame, op: str, *, value_first: bool = False) -> Change | None:
    """A line ``y = y.clone()`` before the in-place operation ``op`` at ``frame``, so that it writes to a copy.

    ``value_first`` says that the statement's own value was computed from ``y`` and needs it again: where it is written
    out (``y[i] = y[i] * s``), a line before the copy computes it from ``y`` as it was.
    None where the written tensor has no name that can be rebound; see ``out_of_place`` for the notes.
    """
    found = target_at(frame, op)
    if found is None:
        return None
    source, target = found[0].source, found[1].node
    name = source.text(target)
    is_repeated = any(
        isinstance(parent, ast.IfExp | ast.BoolOp) or hasattr(parent, "generators")
        for parent, _ in source.ancestors(found[0].node)
    )
    if is_repeated or not can_rebind(source, target):
        return None
    notes = notes_on_rebinding(source, target)
    change = value_and_clone(source, found[0].statement, name, notes) if value_first else None
    if value_first and change is None and computes_with(source, found[0].statement, name):
        return None
    change = change or clone_for_second_name(source, found[0].statement, target, notes)
    return change or insert_before(source, found[0].statement, f"{name} = {cloned(name, op)}", "clone_before", notes)


def clone_at_save(frame: Frame, name: str, *, is_output: bool = True) -> Change | None:
    """The line of ``frame`` with a copy of ``name`` instead of ``name`` itself, so that autograd saves the copy.

    Where the statement binds ``name``, its result is copied instead: the name then refers to a copy of the saved
    tensor. Not where an operation within it saved what it read: ``k`` of ``k = f(y + dt * k)``.
    """
    statement = _only(place for place in statements_at(frame) if _touches(place, name))
    if statement is None:
        return None
    source, node = statement.source, statement.node
    operations = [place.node for place in expressions_at(frame) if source.statement(place.node) is node]
    within = operations[0] if len(operations) == 1 else node
    # ``x /= x.std()``: the copy is for ``std``.
    is_operand = isinstance(node, ast.AugAssign) and any(one is within for one in ast.walk(node.value))
    if not is_output and isinstance(node, ast.Assign) and within is not node:
        is_operand = any(_reads_whole(source, place, name) for place in _own(within))
    if name in assigned_names(node) and not is_operand:
        binding = _binding(node, name)
        if binding is None:
            return None
        if binding.value is not None and _has_own_value(binding) and not isinstance(node, ast.AugAssign):
            is_array = isinstance(binding.value, ast.Call) and leaf_name(binding.value.func) == "numpy"
            copied = "{}.copy()" if is_array else "{}.clone()"
            return edited(source, wrapped(source, binding.value, node, copied), "clone_at_save")
        return insert_after(source, node, f"{name} = {name}.clone()", "clone_at_save")
    reads = [place for place in _own(within) if _reads_whole(source, place, name)]
    edits = [Edit.after(span, ".clone()") for span in map(source.span, reads)]
    return edited(source, edits, "clone_at_save")


def detach_at(frame: Frame, name: str, shape: Shape | None = None) -> Change | None:
    """The statement at ``frame``, which binds ``name``, with the new value detached.

    ``h = h_next`` becomes ``h = h_next.detach()``; where the value is not alone (``seq, state = lstm(x, state)``)
    a line is added. ``shape`` says what the value is: a tensor, or a tuple, list or dict of tensors; by
    default it is inferred from the file (see ``shape_in_source``), else a tensor.
    """
    statement = _only(place for place in statements_at(frame) if _binding(place.node, name) is not None)
    binding = None if statement is None else _binding(statement.node, name)
    if statement is None or binding is None or not binding.computed:
        return None
    source, node = statement.source, statement.node
    shape = shape or shape_in_source(source, binding) or "tensor"
    if not binding.replaces and binding.method is None and shape.startswith(("dict", "defaultdict", "list")):
        shape = shape.partition("/")[2] or "tensor"
    if shape == "object":
        cut = object_cut(source, name)
        return (
            None if cut is None else insert_after(source, node, f"{', '.join(cut[0])} = {', '.join(cut[1])}", "detach")
        )
    if binding.value is not None and _has_own_value(binding) and binding.method is None:
        parts = _parts(binding.value)
        if parts:
            edits = [edit for part in parts for edit in wrapped(source, part, node, DETACHED["tensor"])]
            return edited(source, edits, "detach")
    if binding.value is not None and _is_of_own_class(binding, shape):
        return edited(source, wrapped(source, binding.value, node, DETACHED[_shape_given(source, binding)]), "detach")
    if binding.value is not None and _takes_detached(binding, shape):
        return edited(source, wrapped(source, binding.value, node, detached_form(source, name, shape)), "detach")
    if isinstance(node, ast.Expr) and binding.method in ADDING:
        return None
    return insert_after(source, node, f"{name} = {detached_form(source, name, shape).format(name)}", "detach")


def drop_keyword(frame: Frame, keyword: str) -> Change | None:
    """The line of ``frame`` without ``keyword=…`` in its call; None where no call, or more than one, has it."""
    found = _only(_calls_with(frame, keyword))
    if found is None:
        return None
    source, call = found
    edit = without_keyword(source, call, keyword)
    return None if edit is None else edited(source, [edit], "drop_keyword")


def switch_on_before(frame: Frame, module: str) -> Change | None:
    """``D.requires_grad_(True)`` before the statement at ``frame``; None where that does not read ``D``."""
    found = statement_at(frame)
    if found is None or not any(isinstance(one, ast.expr) and chain_key(one) == module for one in ast.walk(found.node)):
        return None
    return insert_before(found.source, found.node, f"{module}.requires_grad_(True)", "switch_on")


def read_gradients(frame: Frame) -> list[str]:
    """The tensors whose ``.grad`` the function of ``frame``, a backward, reads behind it, in source order.

    The variable of a loop is none of them.
    """
    statement = statement_at(frame)
    scope = None if statement is None else statement.scope
    nodes = [] if statement is None or scope is None else list(local_nodes(scope))
    targets = [one.target for one in nodes if isinstance(one, ast.For)]
    walked = {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    reads = [one for one in nodes if isinstance(one, ast.Attribute) and one.attr == "grad"]
    later = [one for one in reads if statement is not None and one.lineno > statement.span.end_line]
    later.sort(key=lambda one: (one.lineno, one.col_offset))
    names = (chain_key(one.value) for one in later if isinstance(one.ctx, ast.Load))
    return list(dict.fromkeys(one for one in names if one is not None and one.partition(".")[0] not in walked))


def require_grad_of(frame: Frame, names: Sequence[str], *, where_made: bool = False) -> Lines:
    """The changed lines that let ``names`` require grad: where each is made, or before the block of ``frame`` reads it.

    A variable that is given, or made anew in each round, becomes a leaf of its own there: others keep theirs as it is.
    With ``where_made`` none may: an optimizer has them.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return ()
    source, edits = statement.source, list[Edit]()
    before, function = [*source.ahead(statement.node), statement.node], statement.function
    for name in names:
        nodes = [one for one in source.nodes if isinstance(one, ast.Assign | ast.AnnAssign)]
        if name.isidentifier():
            # A variable of another function is another one.
            scope = function if binds(function, name) else None
            nodes = [one for one in nodes if source.function(one) is scope]
        bindings = [one for node in nodes for one in bindings_of(node) if one.name == name and one.replaces]
        made = bindings[0].value if len(bindings) == 1 else None
        # Behind the backward, it is that of the next round.
        is_next = made is not None and source.function(made) is function and made.lineno > statement.span.line
        if isinstance(made, ast.Call) and not is_next:
            edits.append(Edit.after(source.span(made), ".requires_grad_(True)"))
            continue
        if where_made:
            return ()
        bound = max((at for at, one in enumerate(before) if name in assigned_names(one)), default=-1)
        reading = (one for one in before[bound + 1 :] if any(chain_key(node) == name for node in ast.walk(one)))
        first = next(reading, None)
        if first is None or source.indent(source.span(first)).strip():
            return ()
        is_own = name.isidentifier() and (function is None or binds(function, name))
        text = f"{name} = {name}.detach().requires_grad_(True)" if is_own else f"{name}.requires_grad_(True)"
        edits.append(Edit.before(source.span(first), f"{text}\n{source.indent(source.span(first))}"))
    return edited_lines(source, edits)


def has_keyword(frame: Frame, keyword: str) -> bool:
    """Whether a call of the statement at ``frame`` passes ``keyword``."""
    return bool(_calls_with(frame, keyword))


def inplace_false(frame: Frame) -> Change | None:
    """``inplace=False`` instead of ``inplace=True``: in the call at ``frame``, or where its module is made.

    None where neither is found in the file, or the module is one of several.
    """
    found = _only((source, call) for source, call in _calls_with(frame, "inplace") if _inplace_values(call))
    if found is not None:
        source, call = found
        return _not_in_place(source, _inplace_values(call), call)
    for place in expressions_at(frame):
        if isinstance(place.node, ast.Call):
            made = [value for value in constructors(place.source, place.node.func) if isinstance(value, ast.Call)]
            values = [value for call in made for value in _inplace_values(call)]
            if len(values) == 1:
                return _not_in_place(place.source, values, place.node)
    return None


def _not_in_place(source: SourceFile, values: Sequence[ast.expr], call: ast.Call) -> Change | None:
    """``False`` for ``values``; a ``call`` whose result nobody takes binds its argument's name to it."""
    edits = [Edit(source.span(value), "False") for value in values]
    if isinstance(source.parents[call][0], ast.Expr):
        written = call.args[0] if call.args else None
        if not isinstance(written, ast.Name | ast.Attribute | ast.Subscript) or not can_rebind(source, written):
            return None
        at = source.span(call)
        edits.append(Edit.insert(at.line, at.column, f"{source.text(written)} = "))
    return edited(source, edits, "inplace_false")


def _only(found: Iterable[_Found]) -> _Found | None:
    several = list(found)
    return several[0] if len(several) == 1 else None


def _calls_with(frame: Frame, keyword: str) -> list[tuple[SourceFile, ast.Call]]:
    """The calls of the statement at ``frame`` that have ``keyword``; only the call being executed where it has it."""

    def has(call: ast.Call) -> bool:
        is_by_place = keyword == "inplace" and bool(_inplace_values(call))
        return is_by_place or any(one.arg == keyword for one in call.keywords)

    running = [place.node for place in expressions_at(frame) if isinstance(place.node, ast.Call)]
    if len(running) == 1 and has(running[0]):
        source = expressions_at(frame)[0].source
        return [(source, running[0])]
    return [
        (statement.source, node)
        for statement in statements_at(frame)
        for node in header_nodes(statement.node)
        if isinstance(node, ast.Call) and has(node)
    ]


def _inplace_values(call: ast.Call) -> list[ast.expr]:
    value = in_place_argument(call, is_known=True)
    return [] if value is None else [value]


def _binding(node: ast.stmt, name: str) -> Binding | None:
    return _only(one for one in bindings_of(node) if one.name == name)


def _touches(statement: Statement, name: str) -> bool:
    nodes = header_nodes(statement.node)
    return name in assigned_names(statement.node) or any(_reads_whole(statement.source, node, name) for node in nodes)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    return header_nodes(node) if isinstance(node, ast.stmt) else ast.walk(node)


def _reads_whole(source: SourceFile, node: ast.AST, name: str) -> bool:
    """Whether ``node`` reads the value of ``name`` itself, not only one of its attributes or methods."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return False
    if chain_key(node) != name and source.text(node) != name:
        return False
    parent, field = source.parents[node]
    is_called = isinstance(parent, ast.Call) and field == "func"
    above, above_field = source.parents[parent] if isinstance(parent, ast.Attribute) else (parent, "")
    is_looked_into = isinstance(parent, ast.Attribute) and not (isinstance(above, ast.Call) and above_field == "func")
    return not is_called and not is_looked_into


def _parts(value: ast.expr) -> list[ast.expr]:
    """The elements of a tuple, list or dict display, which are detached one by one; empty for anything else."""
    if isinstance(value, ast.Tuple | ast.List):
        elements = value.elts
    elif isinstance(value, ast.Dict):
        elements = value.values
    else:
        return []
    if any(isinstance(element, ast.Starred) for element in elements) or (
        isinstance(value, ast.Dict) and None in value.keys
    ):
        return []
    return [part for element in elements for part in (_parts(element) or [element])]


def _has_own_value(binding: Binding) -> bool:
    """Whether the value is bound to this name alone, so that wrapping the value changes nothing else."""
    statement = binding.statement
    return binding.value is not None and not (isinstance(statement, ast.Assign) and len(statement.targets) > 1)


def _is_of_own_class(binding: Binding, shape: Shape) -> bool:
    """Whether ``replay.update(indices, errors)`` is not a container's method: those take one argument."""
    call = getattr(binding.statement, "value", None)
    is_given_more = isinstance(call, ast.Call) and len(call.args) > 1
    return binding.method in KEEPS_SEVERAL and is_given_more and shape not in ("object", "namedtuple")


def _shape_given(source: SourceFile, binding: Binding) -> Shape:
    """The kind of value of the last argument, as the file shows it; a tensor where it shows nothing."""
    scope = source.function(binding.statement) or source.module
    name = None if binding.value is None else chain_key(binding.value)
    bound = [] if name is None else bindings_in(ast.walk(scope), name)
    return next((shape for one in bound if (shape := shape_in_source(source, one))), "tensor")


def _takes_detached(binding: Binding, shape: Shape) -> bool:
    """Whether detaching the value written in the statement detaches the name."""
    # A template that makes a named tuple anew names the value twice.
    if not _has_own_value(binding) or shape == "namedtuple":
        return False
    if isinstance(binding.statement, ast.AugAssign):
        return isinstance(binding.statement.op, ast.Add | ast.Sub) and shape == "tensor"
    if binding.method in KEEPS_SEVERAL:
        return shape != "tensor"
    return binding.method is None or binding.method in ADDING | _STORING_METHODS


def wrapped(source: SourceFile, value: ast.expr, statement: ast.stmt, template: str) -> list[Edit]:
    """The edits that wrap ``value`` in ``template``; none where it ends with that very method already."""
    head, _, tail = template.format("\0").partition("\0")
    span, whole = source.span(value), source.span(statement)
    if not head and isinstance(value, ast.Call) and leaf_name(value.func) == tail.strip(".()"):
        return []
    needs_parentheses = not head and not isinstance(value, TAKES_A_METHOD_CALL)
    if needs_parentheses and isinstance(statement, ast.Assign) and value is statement.value:
        between = Span(*_end(source, statement.targets[-1]), span.line, span.column)
        rest = Span(span.end_line, span.end_column, whole.end_line, whole.end_column)
        # The value is in parentheses already: ``h = (a + b)``.
        if source.slice(between).strip().removeprefix("=").strip() == "(" and source.slice(rest).strip() == ")":
            return [Edit.after(whole, tail)]
    if needs_parentheses:
        head, tail = "(", f"){tail}"
    return [Edit.before(span, head), Edit.after(span, tail)]


def _end(source: SourceFile, node: ast.AST) -> tuple[int, int]:
    span = source.span(node)
    return span.end_line, span.end_column


def mean_where_made(made: Frame) -> tuple[str, Change] | None:
    """The value of the statement at ``made`` as the program names it, and ``.mean()`` for it where it is made.

    None where the operation at ``made`` is only a part of what the statement binds to a name or returns, and where the
    function reads elements of it.
    """
    statement, found = statement_at(made), expressions_at(made)
    node = None if statement is None else statement.node
    value = node.value if isinstance(node, ast.Return | ast.Assign) else None
    if statement is None or node is None or value is None or [one.node for one in found] != [value]:
        return None
    names, text = assigned_names(node), statement.source.text(value)
    if isinstance(node, ast.Assign) and len(names) != 1:
        return None
    indexed = (
        one.value for one in local_nodes(statement.scope or statement.source.module) if isinstance(one, ast.Subscript)
    )
    if any(chain_key(one) in names for one in indexed):
        return None
    is_simple = isinstance(value, TAKES_A_METHOD_CALL)
    change = edited(statement.source, followed(statement.source, value, ".mean()"), "mean_where_made")
    return None if change is None else (names[0] if names else text if is_simple else f"({text})", change)
