"""Calls that PyTorch refuses or warns of, written as the advice says: one small change of the call for each kind."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import Expression, expressions_at
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.tree import SourceFile, Span, read_source

Lines = tuple[tuple[str, int, str], ...]

_OLD_HOOK, _NEW_HOOK = "register_backward_hook", "register_full_backward_hook"
_TAKES_METHOD = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def change_call(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The advice of the diagnosis whose line follows from the call alone, with that line."""
    found: list[Fix] = []
    for kind, change in _CHANGES.items():
        advice = blocks.advice(diagnosis, kind)
        for label in blocks.labels(diagnosis, "written", "used", "note") if advice is not None else ():
            lines = change(label)
            if lines and advice is not None:
                found.append(replace(advice, lines=lines, applicability="review"))
                break
    return tuple(found)


def _detached_anew(label: Label) -> Lines:
    change = out_of_place(label.frame, "detach_")
    return () if change is None else changed_lines(label.frame.file, change)


def _calls(label: Label) -> Iterator[tuple[Expression, ast.Call]]:
    for place in expressions_at(label.frame):
        if isinstance(place.node, ast.Call):
            yield place, place.node


def _with_edit(label: Label, edit: Callable[[SourceFile, ast.Call], Edit | None]) -> Lines:
    edits = [(place.source, one) for place, call in _calls(label) if (one := edit(place.source, call)) is not None]
    change = edited(edits[0][0], [edits[0][1]], "change_call") if len(edits) == 1 else None
    return () if change is None else changed_lines(label.frame.file, change)


def _detached_to_read(label: Label) -> Lines:
    """``x.detach().numpy()`` for ``x.numpy()``, ``np.asarray(x.detach())`` for ``np.asarray(x)``."""

    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        is_method = isinstance(call.func, ast.Attribute) and call.func.attr in ("numpy", "apply_", "map_", "__array__")
        value = call.func.value if isinstance(call.func, ast.Attribute) and is_method else next(iter(call.args), None)
        return _behind(source, value, ".detach()")

    return _with_edit(label, edit)


def _detached_copy(label: Label) -> Lines:
    """``x.detach().clone()`` for ``copy.deepcopy(x)``."""

    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        value = call.args[0] if len(call.args) == 1 and leaf_name(call.func) == "deepcopy" else None
        if value is None or not isinstance(value, _TAKES_METHOD):
            return None
        return Edit(source.span(call), f"{source.text(value)}.detach().clone()")

    return _with_edit(label, edit)


def _averaged(label: Label) -> Lines:
    """``loss.mean().backward()`` for ``loss.backward()``."""

    def edit(source: SourceFile, call: ast.Call) -> Edit | None:
        is_backward = isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args
        return (
            _behind(source, call.func.value, ".mean()")
            if is_backward and isinstance(call.func, ast.Attribute)
            else None
        )

    return _with_edit(label, edit)


def _full_hook(label: Label) -> Lines:
    """``register_full_backward_hook`` wherever the file registers the old one."""
    source = read_source(label.frame.file)
    old = (
        []
        if source is None
        else [source.span(one) for one in source.nodes if isinstance(one, ast.Attribute) and one.attr == _OLD_HOOK]
    )
    edits = [
        Edit(Span(span.end_line, span.end_column - len(_OLD_HOOK), span.end_line, span.end_column), _NEW_HOOK)
        for span in old
    ]
    change = None if source is None else edited(source, edits, "change_call")
    return () if change is None else changed_lines(label.frame.file, change)


def _no_grad_mode(label: Label) -> Lines:
    """``no_grad`` wherever the file of the label switches inference mode on."""
    source = read_source(label.frame.file)
    if source is None:
        return ()
    modes = [one for one in source.nodes if leaf_name(one) == "inference_mode"]
    calls = {id(one.func): one for one in source.nodes if isinstance(one, ast.Call)}
    if any(isinstance(one, ast.Name) or (id(one) in calls and _has_arguments(calls[id(one)])) for one in modes):
        return ()
    spans = [source.span(one) for one in modes]
    length = len("inference_mode")
    edits = [
        Edit(Span(one.end_line, one.end_column - length, one.end_line, one.end_column), "no_grad") for one in spans
    ]
    change = edited(source, edits, "change_call")
    return () if change is None else changed_lines(label.frame.file, change)


def _has_arguments(call: ast.Call) -> bool:
    return bool(call.args or call.keywords)


def _behind(source: SourceFile, value: ast.expr | None, text: str) -> Edit | None:
    if value is None or not isinstance(value, _TAKES_METHOD):
        return None
    span = source.span(value)
    return Edit.insert(span.end_line, span.end_column, text)


def _left_out(label: Label) -> Lines:
    """Without the statement, where others stand beside it."""
    place = next(iter(blocks.placements(label)), None)
    if label.role != "used" or place is None or len(place.block) < 2:
        return ()
    if not isinstance(place.statement, ast.Expr) or not blocks.is_whole_lines(place.source, place.statement):
        return ()
    return blocks.lines_changed(place.source, blocks.removed(place.source, place.statement))


def _without_mark(label: Label) -> Lines:
    """Without the one call of ``mark_dirty`` in the forward that is defined at the label."""
    source = read_source(label.frame.file)
    calls = [
        node
        for node in (source.nodes if source is not None else ())
        if isinstance(node, ast.Expr) and blocks.method_call(node, "mark_dirty") is not None
    ]
    if source is None or len(calls) != 1 or not blocks.is_whole_lines(source, calls[0]):
        return ()
    function = source.function(calls[0])
    if not isinstance(function, ast.FunctionDef) or len(function.body) < 2:
        return ()
    if label.frame.line not in {function.lineno, *(one.lineno for one in function.decorator_list)}:
        return ()
    return blocks.lines_changed(source, blocks.removed(source, calls[0]))


_CHANGES: Mapping[str, Callable[[Label], Lines]] = {
    "detach_out_of_place": _detached_anew,
    "detach_to_read": _detached_to_read,
    "detach_and_clone": _detached_copy,
    "mean_or_sum": _averaged,
    "full_backward_hook": _full_hook,
    "one_backward": _left_out,
    "drop_mark_dirty": _without_mark,
    "no_grad_not_inference": _no_grad_mode,
}
"""The change by the kind of the advice."""
