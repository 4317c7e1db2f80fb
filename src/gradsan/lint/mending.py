"""Lines that fix a linted fault, by the same rewriting as the suggestions of ``gradsan run``."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradsan.lint._findings import Hit, Spot, Suggestion
from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, with_keyword
from gradsan.source.flow.modules import in_place_argument
from gradsan.source.identifiers import imported_as
from gradsan.source.intent.additions import additions
from gradsan.source.rewrite.out_of_place import out_of_place
from gradsan.source.rewrite.updates import under_no_grad
from gradsan.source.tree import SourceFile, Span, read_source


def suggestion_for(hit: Hit, at: Spot, file: str) -> Suggestion | None:
    """The lines that fix ``hit``; None where the source does not determine them."""
    source = read_source(file)
    if source is None:
        return None
    frame = Frame(file, at.line, at.function, at.column, at.end_line, at.end_column, True)
    change = _MAKERS[hit.fix](source, hit, at, frame)
    if change is None or not change.old:
        return None
    return Suggestion(hit.fix, change.line, change.old, change.new, hit.fix in _CERTAIN and not change.notes)


def _spell(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    start = at.end_column - len(str(hit.values["name"]))
    return edited(source, [Edit(Span(at.end_line, start, at.end_line, at.end_column), "requires_grad")], "spell")


def _call_requires_grad(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    for node in source.nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.lineno == at.line:
            span = source.span(node)
            target = node.targets[0]
            if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                text = f"{source.text(target.value)}.requires_grad_({source.text(node.value)})"
                return edited(source, [Edit(span, text)], "call_requires_grad")
    return None


def _call(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    return edited(source, [Edit.insert(at.end_line, at.end_column, "()")], "call")


def _create_graph(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    for node in source.nodes:
        if isinstance(node, ast.Call) and source.span(node) == _span(at):
            edit = with_keyword(source, node, "create_graph", "True")
            return None if edit is None else edited(source, [edit], "create_graph")
    return None


def _inplace_false(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    made = next((place.node for place in hit.places if place.role == "created"), hit.at.node)
    line, column = getattr(made, "lineno", 0), getattr(made, "col_offset", 0)
    for node in source.nodes:
        if isinstance(node, ast.Call) and (node.lineno, node.col_offset) == (line, column):
            value = in_place_argument(node)
            if value is not None:
                return edited(source, [Edit(source.span(value), "False")], "inplace_false")
    return None


def _detach(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    found = [one for one in additions(frame, str(hit.values["name"])) if one.frame.line == at.line]
    return found[0].change if len(found) == 1 else None


def _no_grad(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    return None if imported_as(source, "torch") is None else under_no_grad(frame)


def _out_of_place(source: SourceFile, hit: Hit, at: Spot, frame: Frame) -> Change | None:
    return out_of_place(frame, str(hit.values["method"]))


def _span(spot: Spot) -> Span:
    return Span(spot.line, spot.column, spot.end_line, spot.end_column)


_MAKERS: dict[str, Callable[[SourceFile, Hit, Spot, Frame], Change | None]] = {
    "spell": _spell,
    "call_requires_grad": _call_requires_grad,
    "call": _call,
    "create_graph": _create_graph,
    "inplace_false": _inplace_false,
    "detach": _detach,
    "no_grad": _no_grad,
    "out_of_place": _out_of_place,
}
_CERTAIN = frozenset({"spell", "call", "call_requires_grad", "inplace_false", "detach", "no_grad", "out_of_place"})
