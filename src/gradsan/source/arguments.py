"""Taking an argument out of a call, and putting one in, commas included."""

from __future__ import annotations

import ast
import io
import tokenize

from gradsan.source.change import Edit
from gradsan.source.tree import SourceFile, Span

__all__ = ["with_keyword", "without_keyword"]

_OPENING, _CLOSING = "([{", ")]}"


def with_keyword(source: SourceFile, call: ast.Call, name: str, value: str) -> Edit | None:
    """The edit that gives ``call`` the argument ``name=value``; None where it has that very one already."""
    keyword = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if keyword is not None:
        return None if source.text(keyword.value) == value else Edit(source.span(keyword.value), value)
    parentheses = _argument_bounds(source, call)
    if parentheses is None:
        return None
    _, commas, closing = parentheses
    given = [source.span(one) for one in (*call.args, *(keyword.value for keyword in call.keywords))]
    if not given:
        return Edit.insert(*closing, f"{name}={value}")
    trailing = next((comma for comma in commas if comma >= max((one.end_line, one.end_column) for one in given)), None)
    if trailing is not None:
        return Edit.insert(trailing[0], trailing[1] + 1, f" {name}={value},")
    return Edit.insert(*closing, f", {name}={value}")


def without_keyword(source: SourceFile, call: ast.Call, name: str) -> Edit | None:
    """The edit that removes ``name=…`` from ``call``; None where the call has no such keyword."""
    keyword = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if keyword is None:
        return None
    parentheses = _argument_bounds(source, call)
    if parentheses is None:
        return None
    opening, commas, closing = parentheses
    place = source.span(keyword)
    start, end = (place.line, place.column), (place.end_line, place.end_column)
    before = max((comma for comma in [opening, *commas] if comma < start), default=opening)
    after = min((comma for comma in [*commas, closing] if comma >= end), default=closing)
    if before != opening:
        return Edit(Span(*before, *after), "")
    if after == closing:
        return Edit(Span(opening[0], opening[1] + 1, *closing), "")
    rest = source.lines[after[0] - 1][after[1] :]
    spaces = len(rest) - len(rest.lstrip(" \t"))
    return Edit(Span(*start, after[0], after[1] + 1 + spaces), "")


def _argument_bounds(
    source: SourceFile, call: ast.Call
) -> tuple[tuple[int, int], list[tuple[int, int]], tuple[int, int]] | None:
    """Where the call's opening parenthesis, the commas between its arguments, and its closing parenthesis stand."""
    function, whole = source.span(call.func), source.span(call)
    text = source.slice(Span(function.end_line, function.end_column, whole.end_line, whole.end_column))
    depth = 0
    opening: tuple[int, int] | None = None
    commas: list[tuple[int, int]] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            line = function.end_line + token.start[0] - 1
            column = token.start[1] + (function.end_column if token.start[0] == 1 else 1)
            if token.type == tokenize.OP and token.string in _OPENING:
                depth += 1
                opening = opening or (line, column)
            elif token.type == tokenize.OP and token.string in _CLOSING:
                depth -= 1
                if depth == 0 and opening is not None:
                    return opening, commas, (line, column)
            elif token.type == tokenize.OP and token.string == "," and depth == 1:
                commas.append((line, column))
    except (tokenize.TokenError, SyntaxError):
        return None
    return None
