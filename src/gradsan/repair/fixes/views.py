"""Views: made by index, made where autograd records, made after their base was written.

PyTorch rejects a write through one of several views that a single call returned. A view by index is allowed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradsan.model import Diagnosis, Fix, Label, Lines
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, indentation_of, text_with
from gradsan.source.flow.cuts import mode_of
from gradsan.source.flow.targets import written_expression
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.scatter import part_out_of_place
from gradsan.source.rewrite.suggest import clone_before
from gradsan.source.tree import SourceFile, read_source

_FOLDERS_UP = 3
_SAFE_TO_READ_TWICE = (ast.Name, ast.Attribute)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A loop's source of views: ``whole``, along ``dimension``; ``index`` is the loop's own counter, if any."""

    whole: ast.expr
    dimension: str
    index: str | None = None


def index_views(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The written view, a loop variable, rebound to an index of its base at the start of every iteration."""
    written = blocks.first(diagnosis, "written")
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    if diagnosis.cause != "one_of_several_views_written" or written is None or not name or not name.isidentifier():
        return ()
    place = statement_at(written.frame)
    for loop in reversed(place.loops if place is not None else ()):
        taken = _taken(loop.target, loop.iter, name) if isinstance(loop, ast.For) else None
        if place is not None and taken is not None and isinstance(loop, ast.For):
            fix = _by_index(place.source, loop, taken, name)
            return () if fix is None else (fix,)
    return ()


def _taken(target: ast.expr, source: ast.expr, name: str) -> _Taken | None:
    if isinstance(target, ast.Name):
        return _whole(source) if target.id == name else None
    if not isinstance(target, ast.Tuple) or not isinstance(source, ast.Call) or source.keywords:
        return None
    function = source.func.id if isinstance(source.func, ast.Name) else ""
    if function == "enumerate" and len(target.elts) == 2 and len(source.args) == 1:
        inner = _taken(target.elts[1], source.args[0], name)
        index = target.elts[0]
        return _Taken(inner.whole, inner.dimension, index.id) if inner and isinstance(index, ast.Name) else None
    if function == "zip" and len(target.elts) == len(source.args):
        found = (_taken(one, value, name) for one, value in zip(target.elts, source.args, strict=True))
        return next((one for one in found if one is not None), None)
    return None


def _whole(value: ast.expr) -> _Taken | None:
    """The tensor that is iterated over: itself, or by ``unbind``."""
    if not isinstance(value, ast.Call):
        return _Taken(value, "0") if _is_safe(value) else None
    if leaf_name(value.func) != "unbind" or not isinstance(value.func, ast.Attribute):
        return None
    given = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg == "dim")]
    is_function = isinstance(value.func.value, ast.Name) and value.func.value.id == "torch"
    whole = given.pop(0) if is_function and given else value.func.value
    if len(given) > 1 or not _is_safe(whole):
        return None
    return _Taken(whole, ast.unparse(given[0]) if given else "0")


def _is_safe(value: ast.expr) -> bool:
    """Whether evaluating ``value`` again, in every iteration, has the same result: a name, or its item by number."""
    while isinstance(value, ast.Subscript) and _is_number(value.slice):
        value = value.value
    return isinstance(value, _SAFE_TO_READ_TWICE) and all(
        isinstance(one, ast.Name | ast.Attribute | ast.expr_context) for one in ast.walk(value)
    )


def _is_number(index: ast.expr) -> bool:
    inner = index.operand if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub) else index
    return isinstance(inner, ast.Constant) and type(inner.value) is int


def _by_index(source: SourceFile, loop: ast.For, taken: _Taken, name: str) -> Fix | None:
    body, target, walked = (source.span(node) for node in (loop.body[0], loop.target, loop.iter))
    if walked.end_line >= body.line or source.indent(body).strip():
        return None
    index = taken.index or blocks.fresh_name(source, "index")
    whole = source.text(taken.whole)
    view = f"{whole}[{index}]" if taken.dimension == "0" else f"{whole}.select({taken.dimension}, {index})"
    indent = source.indent(body)
    changes = {body.line: f"{indent}{name} = {view}\n{source.lines[body.line - 1]}"}
    if taken.index is None:
        is_several = isinstance(loop.target, ast.Tuple)
        bare = is_several and not source.text(loop.target).startswith("(")
        edits = [
            Edit.before(target, f"{index}, (" if bare else f"{index}, "),
            *([Edit.after(target, ")")] if bare else []),
            Edit.before(walked, "enumerate("),
            Edit.after(walked, ")"),
        ]
        whole_lines = type(target)(target.line, 1, walked.end_line, len(source.lines[walked.end_line - 1]) + 1)
        changes |= dict.fromkeys(range(target.line, walked.end_line + 1), "")
        changes[target.line] = text_with(source, whole_lines, edits)
    return blocks.fix("index_base_instead", blocks.lines_changed(source, changes))


def record_view(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the statement after the block; where the block still needs its result, switch grad mode on around it."""
    made = blocks.first(diagnosis, "created")
    if diagnosis.cause != "unrecorded_view_written":
        return ()
    for place in () if made is None else (*blocks.placements(made), *_returned_by_call(made, diagnosis)):
        block = place.source.parents[place.statement][0]
        if (
            isinstance(block, ast.With)
            and blocks.switches_grad_off(block)
            and is_whole_lines(place.source, place.statement)
        ):
            lines = _alone(place, block) or _behind(place, block) or _recorded_in_place(place, block)
            return (blocks.fix("move_view_out_of_no_grad", lines),)
    lines = _without_decorator(diagnosis, made)
    return (blocks.fix("move_view_out_of_no_grad", lines),) if lines else ()


def _without_decorator(diagnosis: Diagnosis, made: Label | None) -> Lines:
    """The function that returned the view, in this file or one that it imports from, without ``@torch.no_grad()``.

    It was called by the statement of ``made``, or is the property by whose name the view was written.
    """
    written, tensor = blocks.first(diagnosis, "written"), diagnosis.tensor
    shown = made or written
    at = None if shown is None else statement_at(shown.frame)
    call = at.node.value if at is not None and made is not None and isinstance(at.node, ast.Assign) else None
    called = leaf_name(call.func) if isinstance(call, ast.Call) else None
    name = called or (None if tensor is None or tensor.name is None else tensor.name.rpartition(".")[2])
    if at is None or name is None:
        return ()
    for source in filter(None, (at.source, _imported_from(at.source, name))):
        functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name == name]
        if len(functions) != 1:
            continue
        decorators = functions[0].decorator_list
        switches = [one for one in decorators if mode_of(one) is not None]
        is_it = called is not None or any(leaf_name(one) == "property" for one in decorators)
        span = source.span(switches[0]) if len(switches) == 1 and is_it else None
        if span is not None and source.lines[span.line - 1].strip() == f"@{source.text(switches[0])}":
            return blocks.lines_changed(source, {span.line: ""})
    return ()


def _imported_from(source: SourceFile, name: str) -> SourceFile | None:
    """The file of the program from which another imports ``name``: ``from .patches import patchify``."""
    for node in (one for one in source.nodes if isinstance(one, ast.ImportFrom)):
        if not node.module or all(one.asname or one.name != name for one in node.names):
            continue
        above = Path(source.file).parents
        folders = above[node.level - 1 : node.level] if node.level else above[:_FOLDERS_UP]
        found = (read_source(str(one.joinpath(*node.module.split(".")).with_suffix(".py"))) for one in folders)
        return next(filter(None, found), None)
    return None


def _returned_by_call(made: Label, diagnosis: Diagnosis) -> Iterator[blocks.Placed]:
    """The statement that makes the view in the one function of the file whose result was bound to its name."""
    at, name = statement_at(made.frame), None if diagnosis.tensor is None else diagnosis.tensor.name
    call = at.node.value if at is not None and isinstance(at.node, ast.Assign) else None
    if at is None or not isinstance(at.node, ast.Assign) or not isinstance(call, ast.Call):
        return
    source, target = at.source, at.node.targets[0]
    bound = target.elts if isinstance(target, ast.Tuple) else [target]
    position = next((number for number, one in enumerate(bound) if chain_key(one) == name), None)
    functions = [one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name == leaf_name(call.func)]
    nodes = list(local_nodes(functions[0])) if len(functions) == 1 and position is not None else []
    returns = [one for one in nodes if isinstance(one, ast.Return)]
    if len(returns) != 1 or position is None:
        return
    value = returns[0].value
    given = value.elts if isinstance(value, ast.Tuple) else [value]
    view = given[position] if len(given) == len(bound) else None
    for node in (one for one in nodes if isinstance(one, ast.Assign | ast.Return)):
        block = source.block(node)
        is_bound = isinstance(view, ast.Name) and view.id in blocks.names_bound(node)
        if is_bound or (isinstance(node, ast.Return) and view is not None and not isinstance(view, ast.Name)):
            yield blocks.Placed(source, block, node, block.index(node))


def _behind(place: blocks.Placed, block: ast.With) -> Lines:
    source, node = place.source, place.statement
    bound = blocks.names_bound(node)
    following = place.block[place.index + 1 :]
    is_needed = blocks.names_read(following) & bound
    is_changed = {name for other in following for name in blocks.names_bound(other)} & (
        blocks.names_read([node]) | bound
    )
    if is_needed or is_changed or not isinstance(node, ast.Assign) or len(place.block) < 2 or len(block.items) > 1:
        return ()
    moved = textwrap.indent(textwrap.dedent(blocks.text_of(source, node)), source.indent(block))
    changes = blocks.removed(source, node)
    end = source.span(block).end_line
    changes[end] = moved if end in changes else f"{source.lines[end - 1]}\n{moved}"
    return blocks.lines_changed(source, changes)


def _alone(place: blocks.Placed, block: ast.With) -> Lines:
    """The only statement of a block without the block, where nothing else is on its lines."""
    source, node, span = place.source, place.statement, place.source.span(block)
    between = source.lines[source.span(block.items[-1].context_expr).end_line : source.span(node).line - 1]
    if len(place.block) > 1 or len(block.items) > 1 or between or source.indent(block).strip():
        return ()
    text = textwrap.indent(textwrap.dedent(blocks.text_of(source, node)), source.indent(block))
    return blocks.lines_changed(source, {**dict.fromkeys(range(span.line, span.end_line + 1), ""), span.line: text})


def _recorded_in_place(place: blocks.Placed, block: ast.With) -> Lines:
    source, node = place.source, place.statement
    indent, span = source.indent(node), source.span(node)
    inner = textwrap.indent(blocks.text_of(source, node), indentation_of(source))
    is_inference = any(mode_of(item.context_expr) == "inference_mode" for item in block.items)
    mode = "inference_mode(False)" if is_inference else "enable_grad()"
    text = f"{indent}with torch.{mode}:\n{inner}"
    gone = dict.fromkeys(range(span.line + 1, span.end_line + 1), "")
    return blocks.lines_changed(source, {**gone, span.line: text})


def views_after_write(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Make the views after the write; the same with a write out of place; and only that, which the views do not see."""
    made = blocks.first(diagnosis, "created")
    written = blocks.labels(diagnosis, "written")
    # ``x[:, 1:] += y`` writes twice: the part, and the whole that takes it back.
    if diagnosis.cause != "view_base_written" or len({(one.frame.file, one.frame.line) for one in written}) != 1:
        return ()
    frame, ops = written[0].frame, [one.op or "" for one in written]
    suggested = (suggest(frame, op) for suggest in (out_of_place, part_out_of_place, clone_before) for op in ops)
    new = next((change for change in suggested if change is not None), None)
    pair = None if made is None else blocks.in_one_block(made, written[0])
    base = next(filter(None, (written_expression(frame, op) for op in ops)), "")
    pair = pair if pair is None else (_made_before(*pair, re.split(r"\W", base)[0]), pair[1])
    found: list[Fix] = []
    if pair is not None and _may_swap(*pair):
        found.append(_moved(*pair, None))
        if new is not None:
            found.append(_moved(*pair, new))
    elif pair is not None and new is not None and _may_repeat(*pair):
        text = blocks.text_of(pair[0].source, pair[0].statement)
        end = pair[1].source.span(pair[1].statement).end_line
        texts = blocks.texts_of(pair[1].source, new)
        texts[end] = f"{texts.get(end, pair[1].source.lines[end - 1])}\n{text}"
        found.append(blocks.fix("out_of_place", blocks.lines_changed(pair[1].source, texts), "base_first"))
    if new is not None:
        found.append(blocks.fix("out_of_place", changed_lines(frame.file, new), "base_out_of_place"))
    return tuple(found)


def _made_before(made: blocks.Placed, written: blocks.Placed, base: str) -> blocks.Placed:
    """The statement before the write that made of ``base`` what a loop walks over after it: ``for one in parts``."""
    if not isinstance(made.statement, ast.For) or made.index < written.index:
        return made
    walked = blocks.names_read([made.statement.iter])
    for index, node in reversed(list(enumerate(made.block[: written.index]))):
        if isinstance(node, ast.Assign) and blocks.names_bound(node) & walked and base in blocks.names_read([node]):
            return blocks.Placed(made.source, made.block, node, index)
    return made


def _may_swap(made: blocks.Placed, written: blocks.Placed) -> bool:
    """Whether the views can be made later: nothing in between reads them, or binds names that they are made from."""
    if made.index >= written.index or not isinstance(made.statement, ast.Assign):
        return False
    if not all(is_whole_lines(place.source, place.statement) for place in (made, written)):
        return False
    between = made.block[made.index + 1 : written.index + 1]
    bound = {name for node in between for name in blocks.names_bound(node)}
    views, base = blocks.names_bound(made.statement), blocks.names_read([made.statement])
    return not (blocks.names_read(between) & views) and not (bound & (views | base))


def _may_repeat(made: blocks.Placed, written: blocks.Placed) -> bool:
    """Whether the views can be made again after the write: nothing since has bound them or what they are made from."""
    if made.index >= written.index or not isinstance(made.statement, ast.Assign):
        return False
    if not all(is_whole_lines(place.source, place.statement) for place in (made, written)):
        return False
    bound = {name for node in made.block[made.index + 1 : written.index] for name in blocks.names_bound(node)}
    return not bound & (blocks.names_bound(made.statement) | blocks.names_read([made.statement]))


def _moved(made: blocks.Placed, written: blocks.Placed, new: Change | None) -> Fix:
    source, span = made.source, made.source.span(written.statement)
    text = blocks.text_of(source, written.statement)
    if new is not None:
        text = new.new if new.old else f"{new.new}\n{text}"
    changes = {
        **blocks.removed(source, made.statement),
        **dict.fromkeys(range(span.line, span.end_line + 1), ""),
        span.line: f"{text}\n{blocks.text_of(source, made.statement)}",
    }
    lines = blocks.lines_changed(source, changes)
    return blocks.fix("view_after_write", lines) if new is None else blocks.fix("out_of_place", lines, "base_first")
