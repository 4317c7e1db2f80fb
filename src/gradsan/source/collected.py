"""Lists that every round adds to: the line that empties them when the round is over."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gradsan.model import Frame
from gradsan.source.change import Change
from gradsan.source.identifiers import chain_key, leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.rounds import after_round
from gradsan.source.tree import SourceFile

__all__ = ["forget_collected"]

_ADDING = frozenset({"append", "extend", "appendleft"})


def forget_collected(frames: Sequence[Frame], name: str) -> tuple[Change, str] | None:
    """A line behind the round of ``frames`` that empties the list ``name``, and what it says.

    That is a call of the method by which the list's own class empties it, else ``del`` of what is in it and in the
    lists that are filled beside it and read where the round's function reads this one. None where the file shows nobody
    that adds to the list, or where a round begins with a new one.
    """
    statement = statement_at(frames[0])
    if statement is None:
        return None
    source, (owner, _, last) = statement.source, name.rpartition(".")
    adding = list(_additions(source, last))
    if not adding or _is_renewed(source, name, owner):
        return None
    scope = statement.function or source.module
    read = {chain_key(node) for node in ast.walk(scope) if isinstance(node, ast.Name | ast.Attribute)}
    beside = (f"{owner}.{other}" if owner else other for call in adding for other in _beside(source, call))
    names = [name, *dict.fromkeys(one for one in beside if one != name and one in read)]
    method = next(_emptying(source, last), None) if owner else None
    text = f"{owner}.{method}()" if method else f"del {', '.join(f'{one}[:]' for one in names)}"
    change = after_round(frames, text, "forget_collected")
    return None if change is None else (change, text)


def _additions(source: SourceFile, last: str) -> Iterator[ast.Call]:
    for node in ast.walk(source.module):
        if isinstance(node, ast.Call) and _adds_to(node) == last:
            yield node


def _adds_to(node: ast.AST) -> str | None:
    """``xs`` of ``self.xs.append(…)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        return leaf_name(node.func.value)
    return None


def _beside(source: SourceFile, call: ast.Call) -> Iterator[str]:
    """The lists that the statements of the same block add to."""
    statement = source.statement(call)
    parent, field = source.parents[statement] if statement is not None else (source.module, "body")
    for node in getattr(parent, field):
        other = _adds_to(node.value) if isinstance(node, ast.Expr) else None
        if other is not None:
            yield other


def _is_renewed(source: SourceFile, name: str, owner: str) -> bool:
    """Whether a loop or a function, other than one that makes the owner, gives the list's name a new list."""
    for node in ast.walk(source.module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(chain_key(target) == name for target in targets):
            inside = [around for around, _ in source.ancestors(node)]
            if any(isinstance(around, ast.For | ast.While) for around in inside):
                return True
            if not owner and any(isinstance(around, ast.FunctionDef) for around in inside):
                return False
    return False


def _emptying(source: SourceFile, last: str) -> Iterator[str]:
    """The methods without arguments by which the class that adds to ``self.<last>`` empties it."""
    for owner in (node for node in ast.walk(source.module) if isinstance(node, ast.ClassDef)):
        if not any(_adds_to(node) == last for node in ast.walk(owner)):
            continue
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            required = len(method.args.posonlyargs + method.args.args) - len(method.args.defaults)
            if not method.name.startswith("__") and required == 1 and any(_empties(one, last) for one in method.body):
                yield method.name


def _empties(node: ast.stmt, last: str) -> bool:
    name = f"self.{last}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        return isinstance(function, ast.Attribute) and function.attr == "clear" and chain_key(function.value) == name
    if isinstance(node, ast.Delete):
        return any(isinstance(one, ast.Subscript) and chain_key(one.value) == name for one in node.targets)
    if not isinstance(node, ast.Assign):
        return False
    pairs = [(target, node.value) for target in node.targets]
    for target, value in list(pairs):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            pairs += zip(target.elts, value.elts, strict=True)
    return any(chain_key(target) == name and isinstance(value, ast.List) and not value.elts for target, value in pairs)
