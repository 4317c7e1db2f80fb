"""Members of what a loop walks over: ``sample["x"]``, the ``x`` of ``x, y = batch``, and those of shallow copies."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow.bindings import last_binding, returns_argument, takes_result
from gradsan.source.flow.calls import callers_expression
from gradsan.source.flow.modules import DETACHED, Shape
from gradsan.source.flow.reuse import SecondName
from gradsan.source.flow.rounds import in_same_loops
from gradsan.source.identifiers import assigned_names, leaf_name, local_nodes
from gradsan.source.locate import frame_of, statement_at

_MEMBER = re.compile(r"""(\w+)\[(?:"[^"]*"|'[^']*'|\d+)\]""")
_SHALLOW = frozenset({"dict", "list", "tuple", "copy", "replace"})


def container_of(frame: Frame, name: str) -> str | None:
    """The name of what has ``name`` as a member in the function at ``frame``, or of what it is a shallow copy of."""
    if (member := _MEMBER.fullmatch(name)) is not None:
        return member[1]
    binding = last_binding(frame, name) if name.isidentifier() else None
    statement = None if binding is None else binding.statement
    match statement.value if isinstance(statement, ast.Assign) else None:
        case ast.Name(id=whole) if binding is not None and binding.value is None:
            return whole
        case ast.Call(func=func, args=[ast.Name(id=whole)]) if leaf_name(func) in _SHALLOW:
            return whole
        case ast.Call(func=ast.Attribute(value=ast.Name(id=whole), attr="copy")):
            return whole
        case ast.Dict(keys=[None, *_], values=[ast.Name(id=whole), *_]):
            return whole
    return None


def shared_member(frame: Frame, name: str) -> SecondName | None:
    """``graph.x``, the second name of ``noisy.x``, written at ``frame``: ``noisy`` is a shallow copy of ``graph``.

    None where one of the two is not read again.
    """
    statement, root = statement_at(frame), re.split(r"[.\[]", name, maxsplit=1)[0]
    whole, binding = container_of(frame, root), last_binding(frame, root)
    if statement is None or statement.scope is None or whole in (None, root) or binding is None or root == name:
        return None
    copied, last = binding.statement, statement.node.end_lineno or statement.node.lineno
    written = ast.unparse(ast.parse(name, mode="eval"))
    other = whole + written.removeprefix(root)
    nodes = [one for one in local_nodes(statement.scope) if isinstance(one, ast.Name | ast.Attribute | ast.Subscript)]
    texts = [(node, ast.unparse(node)) for node in nodes if node.lineno > copied.lineno]
    is_bound_anew = any(
        text == written and isinstance(node.ctx, ast.Store) and node.lineno < statement.node.lineno
        for node, text in texts
    )
    read = {text: node.lineno for node, text in texts if isinstance(node.ctx, ast.Load) and node.lineno > last}
    if is_bound_anew or root not in read or other not in read:
        return None
    return SecondName(other, "converted", copied.lineno, read[other], None)


def is_walked_over(frame: Frame, name: str) -> bool:
    """Whether a loop, or a comprehension of the statement at ``frame``, binds ``name`` in turn."""
    binding, statement = last_binding(frame, name), statement_at(frame)
    if binding is not None:
        return isinstance(binding.statement, ast.For | ast.AsyncFor)
    inner = () if statement is None else (one for one in ast.walk(statement.node) if isinstance(one, ast.comprehension))
    return any(isinstance(at, ast.Name) and at.id == name for one in inner for at in ast.walk(one.target))


def is_mapped(frame: Frame) -> bool:
    """Whether the statement at ``frame`` is a loop over ``map(…)``, which calls a function with each element."""
    statement = statement_at(frame)
    walked = statement.node.iter if statement is not None and isinstance(statement.node, ast.For) else None
    return walked is not None and any(
        isinstance(one, ast.Call) and leaf_name(one.func) == "map" for one in ast.walk(walked)
    )


def is_taken_for_copy(frames: Sequence[Frame], name: str) -> bool:
    """Whether what is written as ``name`` gets it in each round of a loop as a second name, or its caller gives it one.

    ``noisy = clean`` with a ``clean`` that is older than the round, or ``noisy = hide(clean)`` where that returns it.
    """
    users = [at for at, frame in enumerate(frames) if frame.is_user]
    own, statement = frames[users[-1]], statement_at(frames[users[-1]])
    binding = last_binding(own, name)
    if statement is not None and binding is not None and isinstance(binding.value, ast.Name):
        loops = [one for one in statement.loops if binding.statement in ast.walk(one)]
        nodes = [node for node in (ast.walk(loops[-1]) if loops else ()) if isinstance(node, ast.Assign)]
        return bool(loops) and not any(binding.value.id in assigned_names(node) for node in nodes)
    outer = frames[users[-2]] if len(users) > 1 and returns_argument(own, name) else None
    call = None if outer is None else statement_at(outer)
    if outer is None or call is None or not takes_result(outer):
        return False
    given = callers_expression(name, own, outer, frames[users[-2] + 1 : users[-1]])
    return given is not None and given not in assigned_names(call)


def put_back(frame: Frame, name: str, shape: Shape) -> tuple[str, Change] | None:
    """What keeps the value of ``name`` for a later round than that of ``frame``, and the statement with it detached.

    ``states[key] = state``, alone or in a tuple, where the function has read ``states[key]`` before.
    """
    statement = statement_at(frame)
    if statement is None:
        return None
    source, nodes = statement.source, list(local_nodes(statement.function or statement.source.module))
    reads = [one for one in nodes if isinstance(one, ast.Subscript | ast.Attribute) and isinstance(one.ctx, ast.Load)]
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(node, ast.Assign) or not isinstance(target, ast.Subscript | ast.Attribute):
            continue
        kept = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else [node.value]
        names = [one.id for one in kept if isinstance(one, ast.Name)]
        is_same = name in names and in_same_loops(frame_of(source, node, frame), frame)
        if is_same and any(one.lineno < node.lineno and source.text(one) == source.text(target) for one in reads):
            cuts = [Edit(source.span(one), DETACHED[shape].format(source.text(one))) for one in kept]
            change = edited(source, cuts, "detach") if len(names) == len(kept) else None
            return None if change is None else (source.text(target), change)
    return None
