"""A keyword argument given to the call at a frame."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.locate import expression_at

__all__ = ["add_keyword"]


def add_keyword(frame: Frame, keyword: str, value: str) -> Change | None:
    """The line of ``frame``, a call, with ``keyword=value`` after its arguments; None where it may name it already.

    None, too, where the last argument is followed by a comma or the call is no call in parentheses.
    """
    found = expression_at(frame)
    call = None if found is None else found.node
    if found is None or not isinstance(call, ast.Call) or any(one.arg in (keyword, None) for one in call.keywords):
        return None
    span = found.span
    line = found.source.lines[span.end_line - 1][: span.end_column - 1]
    if not line.endswith(")") or line[:-1].rstrip().endswith(","):
        return None
    text = f"{keyword}={value}" if not call.args and not call.keywords else f", {keyword}={value}"
    return edited(found.source, [Edit.insert(span.end_line, span.end_column - 1, text)], keyword)
