"""Statements that write in place by a name, and those that certainly write memory which was handed out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gradsan import source
from gradsan.diagnose.names import TAKE_IN
from gradsan.model import Frame, Site
from gradsan.source.identifiers import leaf_name
from gradsan.source.methods import is_inplace_name
from gradsan.source.tree import SourceFile, read_source

INPLACE = "label.suspect.inplace"
OF_ARRAYS = frozenset(
    {"copyto", "fill", "fill_diagonal", "itemset", "partition", "place", "put", "putmask", "shuffle", "sort"}
)
"""In-place methods of arrays, and functions of NumPy that write into their first argument."""
_VIEWS = frozenset({"T", "reshape", "ravel", "squeeze", "view", "transpose", "swapaxes"})
_GIVES = frozenset({"numpy", "__array__", "asarray"})
_BRANCHES = (
    ast.If,
    ast.Try,
    ast.While,
    ast.Match,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ExceptHandler,
)
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Raise)


def writers(op: str | None, site: Site, save: Site | None, use: Site) -> tuple[tuple[str, Site], ...]:
    """The statements that certainly write memory which ``op`` handed out at ``site``, by the array's name.

    They are in the function that handed it out, or in one that was given the array there, after ``save`` (None: the
    memory was handed out after that) and before ``use``; no branch, jump or new binding lies between.
    """
    frame = site.shown_frame
    place = None if frame is None else source.statement_at(frame)
    if frame is None or place is None:
        return ()
    parsed, node = place.source, place.node
    if op in TAKE_IN:
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and one.args]
        given = {root_of(one.args[0]) for one in calls if leaf_name(one.func) == op}
        names = {one for one in given if one is not None and len(given) == 1}
    else:
        names = {one for one in source.assigned_names(place) if _is_array(getattr(node, "value", None))}
    found = [] if not names else list(_after(parsed, node, names, frame, save, use))
    if not found and not names and save is None:
        found = list(_in_callee(parsed, node, frame))
    if not found and names and save is not None:
        found = list(_in_other_method(parsed, node, names, frame))
        found = found or list(_in_object(parsed, node, min(names), frame, save, use))
    outer = site.frames[: site.frames.index(frame)]
    return tuple((name, Site((*outer, *frames))) for name, frames in found)


def _after(
    parsed: SourceFile, node: ast.stmt, names: set[str], frame: Frame, save: Site | None, use: Site
) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    own, first, uses = _function_of(parsed, node), node.end_lineno or node.lineno, _line_in(use, frame)
    if save is not None:
        saves = _line_in(save, frame)
        if saves is None or saves < first:
            return
        first = saves
    for name, line in _writes(parsed, own, names, node, first):
        if uses is None or line < uses:
            yield name, (replace(frame, line=line, column=None, end_line=None, end_column=None),)


def _in_callee(parsed: SourceFile, node: ast.stmt, frame: Frame) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """The writes of a function of this file that is given the array: ``rescale(x.numpy())``."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        at = next((at for at, one in enumerate(call.args) if _is_array(one)), None)
        named = [one for one in parsed.module.body if isinstance(one, ast.FunctionDef) and one.name == call.func.id]
        if at is None or len(named) != 1 or at >= len(named[0].args.args):
            continue
        function, name = named[0], named[0].args.args[at].arg
        for _, line in _writes(parsed, function, {name}, function, function.lineno):
            yield name, (frame, Frame(frame.file, line, function.name, is_user=True))


def _in_other_method(
    parsed: SourceFile, node: ast.stmt, names: set[str], frame: Frame
) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """The writes of ``self.table`` by the one method of its class that writes it, if nothing else in the file does.

    What a constructor writes is written before the memory is handed out.
    """
    owner, name = parsed.owner_class(node), min(names)
    first, _, attribute = name.rpartition(".")
    if owner is None or first != "self":
        return
    found: dict[ast.AST, None] = {}
    kept = {ast.unparse(one) for one in parsed.nodes if isinstance(one, ast.Attribute) and one.attr == attribute}
    for one in parsed.nodes:
        judged = verdict(one, kept, OF_ARRAYS)
        if judged is not None and judged[0] == INPLACE:
            found[_function_of(parsed, one)] = None
    methods = [one for one in found if not (isinstance(one, ast.FunctionDef) and one.name == "__init__")]
    if len(methods) == 1 and isinstance(methods[0], ast.FunctionDef) and methods[0] in owner.body:
        for _, line in _writes(parsed, methods[0], names, methods[0], methods[0].lineno):
            yield name, (Frame(frame.file, line, methods[0].name, is_user=True),)


def _in_object(
    parsed: SourceFile, node: ast.stmt, name: str, frame: Frame, save: Site, use: Site
) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """The writes of ``self.state`` by the one method of ``env`` that is called between, where ``env`` gave the array.

    ``obs = env.reset()`` and ``obs, reward = env.step(a)`` return it as it is.
    """
    saved, used = _line_in(save, frame), _line_in(use, frame)
    calls = [one for one in ast.walk(_function_of(parsed, node)) if isinstance(one, ast.Call)]
    methods = [(ast.unparse(one.func.value), one) for one in calls if isinstance(one.func, ast.Attribute)]
    bound = [one for one in methods if name in _names_bound(parsed, one[1])]
    owners = {owner for owner, _ in bound}
    held = _class_of(parsed, owners.pop()) if len(owners) == 1 and saved is not None else None
    if held is None or saved is None:
        return
    made, kind = held
    of_class = {one.name: one for one in kind.body if isinstance(one, ast.FunctionDef)}
    giving = [of_class.get(leaf_name(one.func) or "") for _, one in bound]
    given = {text for one in giving if one is not None for text in _returned(one)}
    between = [one for owner, one in methods if owner == bound[0][0] and saved < one.lineno < (used or one.lineno + 1)]
    called = {leaf_name(one.func): one for one in between}
    found = [
        (call, method, line)
        for called_as, call in called.items()
        if (method := of_class.get(called_as or "")) is not None and len(given) == 1
        for _, line in _writes(made, method, given, method, method.lineno)
    ]
    if len({method.name for _, method, _ in found}) == 1:
        for call, method, line in found:
            at = replace(frame, line=call.lineno, column=None, end_line=None, end_column=None)
            yield min(given), (at, Frame(made.file, line, method.name, is_user=True))


def _names_bound(parsed: SourceFile, call: ast.Call) -> list[str]:
    statement = parsed.parents[call][0]
    return source.assigned_names(statement) if isinstance(statement, ast.Assign) else []


def _class_of(parsed: SourceFile, name: str) -> tuple[SourceFile, ast.ClassDef] | None:
    """The class of which the file makes ``name``, there or in a module beside it."""
    made = [one.value for one in parsed.nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name]
    called = leaf_name(made[0].func) if len(made) == 1 and isinstance(made[0], ast.Call) else None
    modules = [one.module for one in parsed.nodes if isinstance(one, ast.ImportFrom) and one.module and not one.level]
    modules += [alias.name for one in parsed.nodes if isinstance(one, ast.Import) for alias in one.names]
    beside = (read_source(str(Path(parsed.file).with_name(f"{one}.py"))) for one in modules if called)
    for other in (parsed, *beside):
        for one in other.module.body if other is not None else ():
            if other is not None and isinstance(one, ast.ClassDef) and one.name == called:
                return other, one
    return None


def _returned(method: ast.FunctionDef) -> set[str]:
    """The attributes that a method returns themselves: ``self.state`` of ``return self.state, reward``."""
    values = [one.value for one in ast.walk(method) if isinstance(one, ast.Return)]
    parts = [part for one in values for part in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return {ast.unparse(one) for one in parts if isinstance(one, ast.Attribute)}


def _writes(
    parsed: SourceFile, own: ast.AST, names: set[str], handed: ast.AST, first: int
) -> Iterator[tuple[str, int]]:
    around = {id(one) for one, _ in parsed.ancestors(handed)} | {id(own)}
    inside = [one for one in ast.walk(own) if isinstance(one, ast.stmt) and _function_of(parsed, one) is own]
    start = handed.lineno  # type: ignore[attr-defined]
    stop = min((one.lineno for one in inside if one.lineno > start and _ends(one, names)), default=None)
    for one in inside:
        branches = [id(outer) for outer, _ in parsed.ancestors(one) if isinstance(outer, _BRANCHES)]
        is_sure = around.issuperset(branches) and first < one.lineno and (stop is None or one.lineno < stop)
        parts = [one, *([] if isinstance(one, ast.For | ast.With | ast.If) else ast.walk(one))]
        if is_sure and any((judged := verdict(part, names, OF_ARRAYS)) and judged[0] == INPLACE for part in parts):
            yield min(names), one.lineno


def _ends(statement: ast.stmt, names: set[str]) -> bool:
    """Whether what follows may not run, or not mean the same memory by these names."""
    is_new = not isinstance(statement, ast.AugAssign) and not names.isdisjoint(source.assigned_names(statement))
    return is_new or isinstance(statement, _LEAVES)


def _function_of(parsed: SourceFile, node: ast.AST) -> ast.AST:
    return parsed.function(node) or parsed.module


def _line_in(site: Site, frame: Frame) -> int | None:
    same = [one.line for one in site.frames if (one.file, one.function) == (frame.file, frame.function)]
    return same[-1] if same else None


def _is_array(value: ast.AST | None) -> bool:
    """Whether an expression is the handed-out memory itself: ``x.detach().numpy()[0].T``, ``np.asarray(x)``."""
    while value is not None:
        if isinstance(value, ast.Subscript) or (isinstance(value, ast.Attribute) and value.attr in _VIEWS):
            value = value.value
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in _GIVES:
                return True
            value = value.func.value if value.func.attr in _VIEWS else None
        else:
            return False
    return False


def later_nodes(frame: Frame, use: Frame | None) -> Iterator[ast.AST]:
    """The operations of the frame's function (or module) after its line, up to the use if that is in the same one."""
    parsed = read_source(frame.file)
    if parsed is None:
        return
    scope: ast.AST = parsed.module
    for node in parsed.nodes:
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.lineno <= frame.line <= (node.end_lineno or node.lineno)
            and node.name == frame.function.rpartition(".")[2]
        ):
            scope = node
    last = use.line if use is not None and use.file == frame.file and use.function == frame.function else None
    for node in parsed.nodes if scope is parsed.module else ast.walk(scope):
        line = getattr(node, "lineno", None)
        if line is not None and line > frame.line and (last is None or line < last):
            yield node


def verdict(node: ast.AST, names: set[str], methods: frozenset[str]) -> tuple[str, int] | None:
    """The reason to take a node for a write by one of the names, and its strength; None without one."""
    if isinstance(node, ast.AugAssign) and root_of(node.target) in names:
        return INPLACE, 3
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and root_of(node) in names:
        return INPLACE, 3
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "out" and root_of(keyword.value) in names:
                return INPLACE, 3
        function = node.func
        is_method = isinstance(function, ast.Attribute) and root_of(function.value) in names
        if isinstance(function, ast.Attribute) and is_inplace_name(function.attr) and is_method:
            return INPLACE, 3
        is_given = any(root_of(argument) in names for argument in node.args)
        if isinstance(function, ast.Attribute) and function.attr in methods and (is_given or is_method):
            return INPLACE, 3
        if is_given:
            return "label.suspect.call", 2
    return None


def root_of(node: ast.AST) -> str | None:
    """``x`` of ``x``, ``x[0]``, ``x.data``, ``x.view(-1)``; ``self.h`` of ``self.h[1:]``; else None."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr in ("data", "T", "mT", "real", "imag", "grad"):
            node = node.value
        else:
            break
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
