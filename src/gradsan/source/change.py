"""Changes of source lines as text: edits of spans, arguments, keywords and indices."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gradsan.model import Frame, Lines
from gradsan.source.locate import expression_at
from gradsan.source.tree import SourceFile, Span, parses, source_lines


@dataclass(frozen=True, slots=True)
class Change:
    """Whole source lines to replace or to add, without their last line end.

    The lines from ``line`` on that read ``old`` become ``new``; where ``old`` is empty, ``new`` goes before ``line``.
    ``kind`` names the change (``out_of_place``, ``clone_before``, ``detach`` …). ``notes`` say when rebinding a name
    does less than writing in place did:

    * ``parameter_not_returned``: a parameter which the function does not return, or whose caller goes on with what it
      passed: the caller keeps the old value
    * ``loop_variable``: the name is a loop's variable: the iterable's elements keep the old values
    * ``aliased``: another name in the function stands for the same tensor and keeps the old value
    """

    line: int
    old: str
    new: str
    kind: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """A replacement of ``span`` by ``text``; an empty span inserts."""

    span: Span
    text: str

    @classmethod
    def insert(cls, line: int, column: int, text: str) -> Edit:
        """Insert ``text`` before ``column`` (from 1) of ``line``."""
        return cls(Span(line, column, line, column), text)

    @classmethod
    def before(cls, span: Span, text: str) -> Edit:
        """Insert ``text`` before ``span``."""
        return cls.insert(span.line, span.column, text)

    @classmethod
    def after(cls, span: Span, text: str) -> Edit:
        """Insert ``text`` after ``span``."""
        return cls.insert(span.end_line, span.end_column, text)


def apply_change(text: str, change: Change) -> str:
    """The source ``text`` with ``change`` applied. Raises ValueError where the old lines do not match."""
    lines = text.split("\n")
    index = change.line - 1
    new = change.new.split("\n")
    if not change.old:
        return "\n".join([*lines[:index], *new, *lines[index:]])
    old = change.old.split("\n")
    if lines[index : index + len(old)] != old:
        raise ValueError(f"line {change.line} does not read {old[0]!r}")
    return "\n".join([*lines[:index], *new, *lines[index + len(old) :]])


def together(file: str, changes: Sequence[Change]) -> Change:
    """One change of the lines from the first to the last of ``changes``, which do not overlap."""
    lines = source_lines(file)
    text = "\n".join(lines)
    for change in sorted(changes, key=lambda one: one.line, reverse=True):
        text = apply_change(text, change)
    first = min(one.line for one in changes) - 1
    last = max(one.line + one.old.count("\n") - (not one.old) for one in changes)
    new = text.split("\n")
    kept = len(new) - (len(lines) - last)
    return Change(first + 1, "\n".join(lines[first:last]), "\n".join(new[first:kept]), changes[0].kind)


def changed_at(frame: Frame | None, suggest: Callable[[Frame], Change | None]) -> Lines:
    """The lines that ``suggest`` changes for the statement at ``frame``; empty where there is no frame or no change."""
    return () if frame is None else changed_lines(frame.file, suggest(frame))


def changed_lines(file: str, change: Change | None) -> Lines:
    """``change`` as ``model.Fix.lines``: (file, line, new text of that line), "" for a removed line.

    An added line is joined to the line that it precedes. Empty where there is no change, or the text of ``file`` does
    not match.
    """
    if change is None:
        return ()
    lines = source_lines(file)
    if not change.old:
        if change.line <= len(lines):
            return ((file, change.line, f"{change.new}\n{lines[change.line - 1]}"),)
        return ((file, len(lines), f"{lines[-1]}\n{change.new}"),) if lines else ()
    old = tuple(change.old.split("\n"))
    if lines[change.line - 1 : change.line - 1 + len(old)] != old:
        return ()
    return tuple((file, change.line + index, text) for index, text in _by_line(old, change.new.split("\n")))


def _by_line(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The lines of ``old`` that ``new`` has not, by their index, each with the text that takes its place.

    No difflib: this runs where a program's own ``difflib.py`` would be found.
    """
    most = min(len(old), len(new))
    head = next((at for at in range(most) if old[at] != new[at]), most)
    tail = next((at for at in range(most - head) if old[-1 - at] != new[-1 - at]), most - head)
    gone, text = range(head, len(old) - tail), list(new[head : len(new) - tail])
    if len(gone) == len(text):
        yield from ((at, line) for at, line in zip(gone, text, strict=True) if old[at] != line)
    elif gone:
        yield head, "\n".join(text)
        yield from ((at, "") for at in gone[1:])
    elif head < len(old):
        yield head, "\n".join([*text, old[head]])
    else:
        yield head - 1, "\n".join([old[head - 1], *text])


def edited(source: SourceFile, edits: Sequence[Edit], kind: str, notes: tuple[str, ...] = ()) -> Change | None:
    """The change that applies ``edits`` (which must not overlap); None where the result would not be Python."""
    if not edits:
        return None
    first = min(edit.span.line for edit in edits)
    last = max(edit.span.end_line for edit in edits)
    old = "\n".join(source.lines[first - 1 : last])
    lines = _with_edits(source, first, last, edits)
    return checked(source, Change(first, old, "\n".join(lines), kind, notes))


def edited_lines(source: SourceFile, edits: Sequence[Edit]) -> Lines:
    """``edits`` as ``model.Fix.lines``, with the edited lines only; empty where the result would not be Python."""
    if edited(source, edits, "") is None:
        return ()
    groups: list[list[Edit]] = []
    for edit in sorted(edits, key=lambda one: one.span):
        if groups and edit.span.line <= max(one.span.end_line for one in groups[-1]):
            groups[-1].append(edit)
        else:
            groups.append([edit])
    lines: list[tuple[str, int, str]] = []
    for group in groups:
        first, last = group[0].span.line, max(one.span.end_line for one in group)
        lines.append((source.file, first, "\n".join(_with_edits(source, first, last, group))))
        lines += [(source.file, line, "") for line in range(first + 1, last + 1)]
    return tuple(lines)


def indentation_of(source: SourceFile) -> str:
    """One level of the file's indentation: that of its first block, four spaces where it has none."""
    for node in source.nodes:
        body = getattr(node, "body", None)
        if isinstance(node, ast.stmt) and isinstance(body, list) and body:
            outer, inner = source.span(node), source.span(body[0])
            text = source.lines[inner.line - 1][: inner.column - 1]
            if inner.line != outer.line and not text.strip():
                return text[outer.column - 1 :]
    return "    "


def text_with(source: SourceFile, span: Span, edits: Sequence[Edit]) -> str:
    """The characters of ``span`` with ``edits`` applied, all of which must lie within it and must not overlap."""
    text = "\n".join(_with_edits(source, span.line, span.end_line, edits))
    after = len(source.lines[span.end_line - 1]) - (span.end_column - 1)
    return text[span.column - 1 : len(text) - after]


def insert_before(
    source: SourceFile, statement: ast.stmt, text: str, kind: str, notes: tuple[str, ...] = ()
) -> Change | None:
    """The change that runs ``text``, a simple statement, right before ``statement``; None where that is impossible."""
    span = source.span(statement)
    if isinstance(statement, ast.While) or source.slice(span).startswith("elif"):
        return None
    decorators = getattr(statement, "decorator_list", [])
    line = min([span.line, *(decorator.lineno for decorator in decorators)])
    head = source.lines[line - 1][: span.column - 1]
    if not head.strip():
        return checked(source, Change(line, "", head + text, kind, notes))
    return edited(source, [Edit.before(span, f"{text}; ")], kind, notes)


def insert_after(source: SourceFile, statement: ast.stmt, text: str, kind: str) -> Change | None:
    """The change that runs ``text``, a simple statement, right after ``statement``; None after a compound one."""
    if hasattr(statement, "body") or isinstance(statement, ast.Match):
        return None
    span = source.span(statement)
    head = source.indent(span)
    tail = source.lines[span.end_line - 1][span.end_column - 1 :].strip()
    if not head.strip() and (not tail or tail.startswith("#")):
        return checked(source, Change(span.end_line + 1, "", head + text, kind))
    return edited(source, [Edit.after(span, f"; {text}")], kind)


def _with_edits(source: SourceFile, first: int, last: int, edits: Sequence[Edit]) -> list[str]:
    """The lines from ``first`` to ``last`` with ``edits`` applied."""
    lines = list(source.lines[first - 1 : last])
    for edit in sorted(edits, key=lambda edit: edit.span, reverse=True):
        start, end = edit.span.line - first, edit.span.end_line - first
        head, tail = lines[start][: edit.span.column - 1], lines[end][edit.span.end_column - 1 :]
        lines[start : end + 1] = (head + edit.text + tail).split("\n")
    return lines


def checked(source: SourceFile, change: Change) -> Change | None:
    """``change``, or None where ``source`` would no longer be Python with it.

    Only the statements of the module that it touches are parsed where they are Python: the rest stays as it is.
    """
    text = apply_change("\n".join(source.lines), change)
    removed = change.old.count("\n") + 1 if change.old else 0
    starts = [min(one.lineno for one in (each, *getattr(each, "decorator_list", ()))) for each in source.module.body]
    first = max((line for line in starts if line <= change.line), default=1)
    behind = min((line for line in starts if line >= change.line + max(removed, 1)), default=len(source.lines) + 1)
    part = "\n".join(text.split("\n")[first - 1 : behind - 1 + change.new.count("\n") + 1 - removed])
    return change if parses(part) or parses(text) else None


TAKES_A_METHOD_CALL = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Dict, ast.ListComp, ast.DictComp),
)


def followed(source: SourceFile, node: ast.expr, call: str) -> list[Edit]:
    """The edits that put a method ``call`` behind an expression, which gets parentheses where it is an operation."""
    span = source.span(node)
    if isinstance(node, TAKES_A_METHOD_CALL):
        return [Edit.after(span, call)]
    return [Edit.before(span, "("), Edit.after(span, f"){call}")]


_OPENING, _CLOSING = "([{", ")]}"


def with_keyword(source: SourceFile, call: ast.Call, name: str, value: str) -> Edit | None:
    """The edit that gives ``call`` the argument ``name=value``; None where it has exactly that already."""
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
    """The positions of the call's opening parenthesis, the commas between arguments, and its closing parenthesis."""
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


def add_keyword(frame: Frame, keyword: str, value: str, instead_of: str | None = None) -> Change | None:
    """The line of ``frame``, a call, with ``keyword=value`` after its arguments; None where it may pass it already.

    Unless it passes ``instead_of``, which the value then replaces. None, too, where the last argument
    is followed by a comma or the call has no parentheses.
    """
    found = expression_at(frame)
    call = None if found is None else found.node
    if found is None or not isinstance(call, ast.Call):
        return None
    given = [one.value for one in call.keywords if one.arg in (keyword, None)]
    if len(given) == 1 and found.source.text(given[0]) == instead_of:
        return edited(found.source, [Edit(found.source.span(given[0]), value)], keyword)
    if given:
        return None
    span = found.span
    line = found.source.lines[span.end_line - 1][: span.end_column - 1]
    if not line.endswith(")") or line[:-1].rstrip().endswith(","):
        return None
    text = f"{keyword}={value}" if not call.args and not call.keywords else f", {keyword}={value}"
    return edited(found.source, [Edit.insert(span.end_line, span.end_column - 1, text)], keyword)


def elements_of(part: ast.Subscript) -> list[ast.expr]:
    """The elements of the index: ``[a, b]`` of ``x[a, b]``, one of ``x[a]``."""
    return part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]


def is_all(index: ast.expr) -> bool:
    """Whether the element is ``:``."""
    return isinstance(index, ast.Slice) and index.lower is None and index.upper is None and index.step is None


def is_gap(index: ast.expr) -> bool:
    """Whether the element is ``...`` or ``None``, which stand for no dimension or for several."""
    return isinstance(index, ast.Constant) and (index.value is Ellipsis or index.value is None)


def is_number(value: ast.expr) -> bool:
    """Whether an expression is a number literal, with or without a sign."""
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    return (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float) and not isinstance(value.value, bool)
    )


def may_be_number(index: ast.expr) -> bool:
    """Whether an element may be one position: not a comparison, a slice or a string."""
    if isinstance(index, ast.Constant):
        return isinstance(index.value, int) and not isinstance(index.value, bool)
    return isinstance(index, ast.Name | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Attribute | ast.Call)


_BINDING_STRENGTH: dict[type[ast.operator], int] = {
    getattr(ast, name): strength
    for strength, names in (
        (1, "BitOr"),
        (2, "BitXor"),
        (3, "BitAnd"),
        (4, "LShift RShift"),
        (5, "Add Sub"),
        (8, "Pow"),
    )
    for name in names.split()
} | dict.fromkeys((ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult), 6)
_UNARY_STRENGTH = 7
_SELF_CONTAINED = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.Dict, ast.Set),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr),
)


def augmented_value(source: SourceFile, node: ast.AugAssign) -> str | None:
    """``x + y`` of ``x += y``; None where the syntax is not supported."""
    target, whole = source.span(node.target), source.span(node)
    between = Span(target.end_line, target.end_column, whole.end_line, whole.end_column)
    operator, equals, value = source.slice(between).lstrip(" \t").partition("=")
    if not equals or operator.strip("+-*/%@&|^<>"):
        return None
    value = value.strip()
    return f"{source.text(node.target)} {operator} {value if _stands_alone(source, node) else f'({value})'}"


def _stands_alone(source: SourceFile, node: ast.AugAssign) -> bool:
    """Whether the right side needs no parentheses after ``x <operator>``: it binds tighter, or has some already."""
    value, whole = source.span(node.value), source.span(node)
    if (value.end_line, value.end_column) != (whole.end_line, whole.end_column):
        return True
    if isinstance(node.value, ast.BinOp):
        return _BINDING_STRENGTH[type(node.value.op)] > _BINDING_STRENGTH[type(node.op)]
    if isinstance(node.value, ast.UnaryOp):
        return not isinstance(node.value.op, ast.Not) and _BINDING_STRENGTH[type(node.op)] != _UNARY_STRENGTH
    if isinstance(node.value, ast.Tuple):
        return source.slice(value).startswith("(")
    return isinstance(node.value, _SELF_CONTAINED)
