"""Custom Functions and checkpointed functions in the source: where they save values, and lines that save correctly."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, insert_before
from gradsan.source.flow.targets import written_expression
from gradsan.source.identifiers import assigned_names, chain_key, leaf_name, local_nodes, parameters
from gradsan.source.locate import at_span, statement_at
from gradsan.source.methods import METADATA
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_Method = ast.FunctionDef | ast.AsyncFunctionDef
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_NO_CHANGE = ("detach", "contiguous")
_SAME_MEMORY = frozenset(
    {*_NO_CHANGE, "data", "numpy", "squeeze", "t", "T", "transpose", "unsqueeze", "view", "view_as"}
)


@dataclass(frozen=True, slots=True)
class SavedEarly:
    """A tensor ``name`` that the line ``line`` saves, or keeps on ``ctx``, before it is written in place."""

    name: str
    line: int
    argument: ast.expr


def saved_early(write: Frame, op: str) -> SavedEarly | None:
    """What a Function's forward saves, or keeps on ``ctx``, and the operation ``op`` at ``write`` writes after that."""
    statement, name = statement_at(write), written_expression(write, op)
    if statement is None or name is None or not isinstance(statement.function, _Method):
        return None
    nodes = list(local_nodes(statement.function))
    given = (one for node in nodes for one in _saved_by(node, statement.function))
    earlier = (one for one in given if one[0] < statement.node.lineno)
    line, argument = next((one for one in earlier if chain_key(one[1]) == name), (0, None))
    if argument is None:
        return None
    between = [
        node
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and line < node.lineno < statement.node.lineno
    ]
    is_bound_anew = any(name in assigned_names(node) for node in between)
    return None if is_bound_anew else SavedEarly(name, line, argument)


def _saved_by(node: ast.AST, forward: _Method) -> Iterator[tuple[int, ast.expr]]:
    """The arguments of ``ctx.save_for_backward(x)``, and the value of ``ctx.x = x``, with their line."""
    if isinstance(node, ast.Call) and leaf_name(node.func) == "save_for_backward":
        yield from ((node.lineno, one) for one in node.args)
    elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Attribute):
        owner = node.targets[0].value
        if isinstance(owner, ast.Name) and owner.id in parameters(forward)[:1]:
            yield node.lineno, node.value


def copy_saved_early(write: Frame, op: str) -> Change | None:
    """A copy of what is written later: ``ctx.save_for_backward(x.clone(), s)``, ``ctx.x = x.clone()``."""
    statement, found = statement_at(write), saved_early(write, op)
    if statement is None or found is None:
        return None
    span = statement.source.span(found.argument)
    return edited(statement.source, [Edit.after(span, ".clone()")], "copy_saved_early")


def kept_on_context(frame: Frame, attribute: str) -> Frame | None:
    """The statement ``ctx.<attribute> = …`` of the Function whose forward is defined at ``frame``."""
    found = function_at(frame)
    if found is None:
        return None
    source, forward = found
    places = list(_kept(source, forward, attribute))
    return frame_in(source, places[0][1], frame.file) if len(places) == 1 else None


def name_kept(frame: Frame, attribute: str) -> str | None:
    """The name of what ``ctx.<attribute> = x.detach().numpy()`` keeps, ``x``; ``frame`` defines forward.

    An element is that of a tuple, a list or a dict: ``ctx.kept = (x.detach(), mask)``.
    """
    found = _value_kept(frame, attribute)
    value = None if found is None else found[1]
    while value is not None and (inner := _same_memory(value)) is not None:
        value = inner
    return None if value is None else chain_key(value)


def copy_element_kept(frame: Frame, attribute: str) -> Change | None:
    """``ctx.kept = [x.clone(), mask]`` for the attribute ``kept[0]``; ``frame`` defines forward."""
    found = _value_kept(frame, attribute)
    if found is None or not isinstance(found[1], ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return None
    return edited(found[0], [Edit.after(found[0].span(found[1]), ".clone()")], "copy_on_context")


def _value_kept(frame: Frame, attribute: str) -> tuple[SourceFile, ast.expr] | None:
    found, (attribute, _, element) = function_at(frame), attribute.partition("[")
    kept = [] if found is None else [node for _, node in _kept(*found, attribute)]
    if found is None or len(kept) != 1:
        return None
    target, value = kept[0].targets[0], kept[0].value
    if isinstance(target, ast.Tuple):
        places = [place for place, one in enumerate(target.elts) if leaf_name(one) == attribute]
        if not isinstance(value, ast.Tuple) or len(value.elts) != len(target.elts) or len(places) != 1:
            return None
        value = value.elts[places[0]]
    if element:
        elements = list(value.elts) if isinstance(value, ast.Tuple | ast.List) else []
        held = {f"{at}]": one for at, one in enumerate(elements)}
        if isinstance(value, ast.Dict):
            held = {f"{key and ast.unparse(key)}]": one for key, one in zip(value.keys, value.values, strict=True)}
        if element not in held:
            return None
        value = held[element]
    return found[0], value


def _same_memory(value: ast.expr) -> ast.expr | None:
    """``x`` of ``x.detach()``, ``x.numpy()``, ``x.view(...)`` and ``x.data``; None of anything else."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.value if value.func.attr in _SAME_MEMORY else None
    return value.value if isinstance(value, ast.Attribute) and value.attr in _SAME_MEMORY else None


def save_for_backward(frame: Frame, attribute: str) -> tuple[Change, ...]:
    """Changes that keep ``ctx.<attribute>`` by ``save_for_backward``; ``frame`` is the definition of forward.

    Empty where the Function saves something already, or uses the attribute other than by reading it in backward.
    """
    found = function_at(frame)
    if found is None:
        return ()
    source, forward = found
    owner = source.owner_class(forward)
    kept = list(_kept(source, forward, attribute))
    if (
        owner is None
        or len(kept) != 1
        or isinstance(kept[0][1].targets[0], ast.Tuple)
        or any(
            isinstance(node, ast.Attribute) and node.attr in ("save_for_backward", "saved_tensors")
            for node in ast.walk(owner)
        )
    ):
        return ()
    context, statement = kept[0]
    uses = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and node.attr == attribute]
    reads = [node for node in uses if isinstance(node.ctx, ast.Load)]
    backward = {id(node) for method in _methods(owner, "backward") for node in ast.walk(method)}
    if not reads or len(uses) != len(reads) + 1 or not all(id(node) in backward for node in reads):
        return ()
    target = source.span(statement.targets[0])
    value, whole = statement.value, source.span(statement)
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _NO_CHANGE:
        value = value.func.value
    if target.line != whole.end_line:
        return ()
    saved = Edit(whole, f"{context}.save_for_backward({source.text(value)})")
    changes = [edited(source, [saved], "save_for_backward")]
    lines: dict[int, list[Edit]] = {}
    for node in reads:
        span = source.span(node)
        lines.setdefault(span.line, []).append(Edit(span, f"{source.text(node.value)}.saved_tensors[0]"))
    changes += [edited(source, edits, "save_for_backward") for edits in lines.values()]
    return tuple(change for change in changes if change is not None) if all(changes) else ()


def earlier_reads(frame: Frame, attribute: str) -> tuple[Frame, ...]:
    """The other places where the function at ``frame`` reads ``<something>.<attribute>``, up to its line."""
    statement = statement_at(frame)
    if statement is None or statement.function is None:
        return ()
    source = statement.source
    reads = [
        source.span(node)
        for node in local_nodes(statement.function)
        if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load)
    ]
    here = (frame.line, frame.column or 1)
    return tuple(at_span(frame, one) for one in sorted(reads) if (one.line, one.column) < here)


def mark_dirty(frame: Frame, parameter: str) -> Change | None:
    """``ctx.mark_dirty(<parameter>)`` before the return of the forward defined at ``frame``.

    None where forward returns something else: a tensor marked dirty must itself be returned.
    """
    found = function_at(frame)
    if found is None:
        return None
    source, forward = found
    returns = [node for node in local_nodes(forward) if isinstance(node, ast.Return)]
    names = parameters(forward)
    if len(returns) != 1 or parameter not in names[1:]:
        return None
    value = returns[0].value
    elements = value.elts if isinstance(value, ast.Tuple) else [value]
    if not any(isinstance(one, ast.Name) and one.id == parameter for one in elements):
        return None
    return insert_before(source, returns[0], f"{names[0]}.mark_dirty({parameter})", "mark_dirty")


def gradients_for_inputs(frame: Frame, needs: tuple[bool, ...], many: int) -> tuple[Change, ...]:
    """``None`` in the returns of the backward defined at ``frame``, which returns ``many`` gradients for more inputs.

    ``needs`` says for each input whether it needs a gradient. The existing gradients go to the inputs that need one
    where their numbers agree, else to the first inputs. Empty where an input that needs one would get none, or a None.
    """
    found = function_at(frame)
    if found is None or not 0 < many < len(needs):
        return ()
    source, backward = found
    filled = needs if sum(needs) == many else tuple(position < many for position in range(len(needs)))
    if any(need and not fill for need, fill in zip(needs, filled, strict=True)):
        return ()
    changes: list[Change | None] = []
    for node in local_nodes(backward):
        if not isinstance(node, ast.Return):
            continue
        given = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        if len(given) != many or any(one is None or isinstance(one, ast.Starred) for one in given):
            return ()
        rest = iter(given)
        texts = [source.text(next(rest) or node) if fill else "None" for fill in filled]
        if any(need and text == "None" for need, text in zip(needs, texts, strict=True)):
            return ()  # one that is needed was not computed
        changes.append(edited(source, [Edit(source.span(node), f"return {', '.join(texts)}")], "return_one_each"))
    return tuple(change for change in changes if change is not None) if all(changes) else ()


def function_at(frame: Frame) -> tuple[SourceFile, FunctionNode] | None:
    """The function that is defined at ``frame``, and its file; None where the source does not tell it from others."""
    source = read_source(frame.file)
    if source is None:
        return None
    name = frame.function.rpartition(".")[2]
    found: list[FunctionNode] = []
    for node in source.nodes:
        if isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == frame.line:
            found.append(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found += [node] if frame.line in (first, node.lineno) else []
    return (source, found[0]) if len(found) == 1 else None


def _methods(owner: ast.ClassDef, *names: str) -> Iterator[_Method]:
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in names:
            yield node


def _kept(source: SourceFile, forward: FunctionNode, attribute: str) -> Iterator[tuple[str, ast.Assign]]:
    owner = source.owner_class(forward)
    for method in () if owner is None else _methods(owner, "forward", "setup_context"):
        context = parameters(method)[:1]
        for node in local_nodes(method):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                bound = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
                if context and f"{context[0]}.{attribute}" in map(chain_key, bound):
                    yield context[0], node


def frame_in(source: SourceFile, node: ast.stmt, file: str) -> Frame:
    """The frame at a statement; of a loop, at its header."""
    span = source.span(node)
    end_line, end_column = (span.end_line, span.end_column)
    if isinstance(node, _LOOPS):
        header = source.span(node.test if isinstance(node, ast.While) else node.iter)
        end_line, end_column = header.end_line, header.end_column
    return Frame(file, span.line, source.scope_name(node), span.column, end_line, end_column, True)


_CUTTING = frozenset({"data", "detach", "item", "no_grad", "numpy", "tolist"})


def without_once_differentiable(frame: Frame) -> Change | None:
    """The removal of ``@once_differentiable`` in the file of ``frame``, if it marks the backward of just one Function.

    None where that backward may not be differentiable: where it cuts graphs or calls functions that may, or computes
    with something that is neither an argument of forward nor its result, which has no graph in backward. Such a value
    may only be compared.
    """
    source = read_source(frame.file)
    if source is None:
        return None
    marked = [
        (parent, node, mark)
        for node in source.nodes
        if isinstance(node, ast.FunctionDef) and isinstance(parent := source.parents[node][0], ast.ClassDef)
        for mark in node.decorator_list
        if leaf_name(mark) == "once_differentiable"
    ]
    if len(marked) != 1:
        return None
    owner, backward, mark = marked[0]
    forward = next((one for one in owner.body if isinstance(one, ast.FunctionDef) and one.name == "forward"), None)
    row = source.lines[mark.lineno - 1]
    is_sure = forward is not None and _is_differentiable(forward, backward) and row.lstrip().startswith("@")
    return Change(mark.lineno, row, "", "once_differentiable") if is_sure else None


def _is_differentiable(forward: FunctionNode, backward: FunctionNode) -> bool:
    inside = list(ast.walk(backward))
    if any(isinstance(one, ast.Attribute | ast.Name) and leaf_name(one) in _CUTTING for one in inside):
        return False
    nodes = list(local_nodes(forward))
    if any(_may_cut(one.func) for one in inside if isinstance(one, ast.Call)):
        return False
    results = [one.value for one in nodes if isinstance(one, ast.Return) and one.value is not None]
    passed = [part for one in results for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    bound_in = [one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    arguments = set(parameters(forward)).difference(bound_in)
    known = {*arguments, *(one.id for one in passed if isinstance(one, ast.Name) and bound_in.count(one.id) == 1)}
    compared = {one for node in inside if isinstance(node, ast.Compare) for one in ast.walk(node)}
    if any(one not in compared and not _is_given(one, nodes, arguments) for one in _kept_attributes(forward, inside)):
        return False
    saving = [one for one in nodes if isinstance(one, ast.Call) and leaf_name(one.func) == "save_for_backward"]
    saved = [chain_key(one) for call in saving for one in call.args]
    reading = [one for one in inside if isinstance(one, ast.Assign) and "saved_tensors" in ast.unparse(one.value)]
    if len(saving) != 1 or len(reading) != 1:
        return not saving
    target = reading[0].targets[0]
    bound = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    inner = {chain_key(one) for one, name in zip(bound, saved, strict=False) if name not in known}
    reads = (one for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id in inner)
    return len(bound) == len(saved) and all(one in compared for one in reads)


def _may_cut(called: ast.expr) -> bool:
    """Whether a function may cut graphs: one of the user's own, and another Function."""
    return (isinstance(called, ast.Name) and not hasattr(builtins, called.id)) or leaf_name(called) == "apply"


def _kept_attributes(forward: FunctionNode, inside: Sequence[ast.AST]) -> list[ast.Attribute]:
    """The reads, in a backward, of attributes that forward has set on its ``ctx``."""
    context = next(iter(parameters(forward)), "")
    stored = {
        one.attr
        for one in ast.walk(forward)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and chain_key(one.value) == context
    }
    reads = (one for one in inside if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load))
    return [one for one in reads if one.attr in stored]


def _is_given(read: ast.Attribute, nodes: Sequence[ast.AST], arguments: Collection[str]) -> bool:
    """Whether forward keeps under that attribute one of its arguments, a constant, a mask or a shape alone."""
    values = [
        one.value
        for one in nodes
        if isinstance(one, ast.Assign) and any(getattr(it, "attr", None) == read.attr for it in one.targets)
    ]
    return bool(values) and all(
        isinstance(one, ast.Constant | ast.Compare)
        or chain_key(one) in arguments
        or leaf_name(one.func if isinstance(one, ast.Call) else one) in METADATA
        for one in values
    )
