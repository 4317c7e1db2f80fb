"""Clearing, clipping, backward and step without effect: in the wrong order in one block, or named without a call.

Only what stands in the block itself counts, each in a statement of its own, and nothing may be between that could fill
gradients: an unknown call may run a backward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

_CLIPS = frozenset({"clip_grad_norm_", "clip_grad_value_"})
_KINDS = {"backward": "backward", "zero_grad": "clear", "step": "step", **dict.fromkeys(_CLIPS, "clip")}
_HARMLESS = frozenset(
    {
        "print",
        "item",
        "append",
        "float",
        "len",
        "format",
        "detach",
        "cpu",
        "mean",
        "sum",
        "update",
        "set_postfix",
        "write",
    }
)


class _Step(NamedTuple):
    """A statement: what it does, with which owner (``optimizer``), and the call."""

    kind: str
    owner: str
    call: ast.Call | None
    at: int


class InVain(NamedTuple):
    """A call without effect: code, slug, the call, and the values of its sentence."""

    code: str
    slug: str
    call: ast.Call
    values: dict[str, object]


NOT_CALLED = {
    "zero_grad": ("GS214", "zero_grad_not_called"),
    "step": ("GS424", "step_not_called"),
    "backward": ("GS421", "backward_not_called"),
}
"""Methods that a statement names without a call, which does nothing: code and slug."""
_ASKING = frozenset({"raises", "suppress", "assertRaises", "assertRaisesRegex"})


def named_in_vain(body: list[ast.stmt], module: ast.Module) -> Iterator[tuple[ast.Expr, ast.Attribute]]:
    """Yield the statements of ``body`` that name such a method of an optimizer, or of a computed loss.

    Nothing of a file that gives objects such a property, or ``__getattr__``: to name it there may do something.
    """
    found = [
        (one, one.value)
        for one in body
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Attribute) and one.value.attr in NOT_CALLED
    ]
    nodes = list(ast.walk(module)) if found else []
    for statement, named in found:
        properties = {"__getattr__", "__getattribute__", named.attr}
        if any(_is_property(one, properties) for one in nodes):
            continue
        if named.attr == "zero_grad" or _is_trained_with(ast.unparse(named.value), named.attr, nodes):
            yield statement, named


def asks_for_error(statement: ast.stmt) -> bool:
    """Whether the statements right in a block are there to see whether an attribute exists."""
    if isinstance(statement, ast.Try):
        return len(statement.body) == 1 or "AttributeError" in map(ast.unparse, _caught(statement))
    calls = [one.context_expr for one in getattr(statement, "items", ())]
    names = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in calls if isinstance(one, ast.Call)}
    return not _ASKING.isdisjoint(names)


def _caught(statement: ast.Try) -> Iterator[ast.AST]:
    return (part for one in statement.handlers if one.type is not None for part in ast.walk(one.type))


def _is_property(node: ast.AST, names: set[str]) -> bool:
    if not isinstance(node, ast.FunctionDef) or node.name not in names:
        return False
    return node.name.startswith("__") or bool(node.decorator_list)


def _is_trained_with(owner: str, method: str, nodes: list[ast.AST]) -> bool:
    """Whether the file shows ``owner`` to be an optimizer (of ``step``), or a loss that it computes."""
    if method == "step":
        of_optimizers = {"zero_grad", "param_groups"}
        if any(
            isinstance(one, ast.Attribute) and one.attr in of_optimizers and ast.unparse(one.value) == owner
            for one in nodes
        ):
            return True
        made = [one.value for one in nodes if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == owner]
        return any(isinstance(one, ast.Call) and ".parameters(" in ast.unparse(one) for one in made)
    computed = [
        one.value
        for one in nodes
        if isinstance(one, ast.Assign | ast.AugAssign)
        and owner in map(ast.unparse, one.targets if isinstance(one, ast.Assign) else [one.target])
    ]
    is_trained = any(isinstance(one, ast.Attribute) and one.attr == "zero_grad" for one in nodes)
    return is_trained and any(isinstance(one, ast.Call | ast.BinOp) for one in computed)


def in_vain(body: list[ast.stmt], module: ast.Module) -> Iterator[InVain]:
    """Yield the calls of ``body`` that clear gradients before their step, or clip before their backward."""
    if sum(_kind(one) in ("backward", "step", "clear") for one in body) < 3:
        return
    filling = _with_backward(module)
    steps = [_step(one, filling) for one in body]
    for place, backward in enumerate(steps):
        cleared = _next(steps, place, "clear") if backward.kind == "backward" else None
        step = None if cleared is None else _next(steps, cleared, "step")
        if cleared is not None and step is not None and steps[step].owner == steps[cleared].owner:
            call = steps[cleared].call
            if call is not None:
                values: dict[str, object] = {"name": steps[cleared].owner, "line": backward.at}
                yield InVain("GS424", "gradient_cleared", call, values)
    for place, clip in enumerate(steps):
        # Before the clip, what is unknown may have filled gradients; after it, that changes nothing.
        before = [one for one in steps[:place] if one.kind not in ("known", "computed")][-1:]
        after = [one for one in steps[place + 1 :] if one.kind not in ("known", "computed", "unknown")][:2]
        is_early = [one.kind for one in (*before, *after)] == ["clear", "backward", "step"]
        if clip.kind != "clip" or clip.call is None or not is_early:
            continue
        if _belongs(clip.call, before[0].owner, after[1].owner, module):
            yield InVain("GS425", "clip_without_effect", clip.call, {"name": clip.owner, "line": after[0].at})


def _with_backward(module: ast.Module) -> set[str]:
    """The names of the functions of a module that call a backward."""
    return {
        one.name
        for one in ast.walk(module)
        if isinstance(one, ast.FunctionDef)
        and any(isinstance(part, ast.Attribute) and part.attr == "backward" for part in ast.walk(one))
    }


def _next(steps: list[_Step], start: int, kind: str) -> int | None:
    """Return the first statement of ``kind`` after ``start``, if those before it touch no gradient."""
    for at in range(start + 1, len(steps)):
        if steps[at].kind == kind:
            return at
        if steps[at].kind != "known":
            return None
    return None


def _belongs(clip: ast.Call, cleared: str, stepped: str, module: ast.Module) -> bool:
    """Whether a clip gets the parameters that were cleared and are stepped: the source says so by one expression."""
    if not clip.args or cleared not in (stepped, ast.unparse(clip.args[0]).removesuffix(".parameters()")):
        return False
    given = ast.unparse(clip.args[0])
    made = [
        one.value
        for one in ast.walk(module)
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call) and ast.unparse(one.targets[0]) == stepped
    ]
    return len(made) == 1 and bool(made[0].args) and ast.unparse(made[0].args[0]) == given


def _kind(node: ast.stmt) -> str | None:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return None
    return _KINDS.get(_called(call.func))


def _step(node: ast.stmt, filling: set[str]) -> _Step:
    kind = _kind(node)
    call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    if kind is not None and call is not None:
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        # A closure runs a backward; so may what is handed an optimizer, as a scaler is.
        if kind == "step" and (call.args or call.keywords):
            return _Step("unknown", "", None, node.lineno)
        return _Step(kind, ast.unparse(call.func) if kind == "clip" else owner, call, node.lineno)
    if "backward" in ast.unparse(node):
        return _Step("backward within", "", None, node.lineno)
    is_known = isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign) and all(
        _is_harmless(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)
    )
    reads = any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))
    # What is computed for a loss calls much that is unknown; what is called for its effect may fill gradients.
    is_computed = isinstance(node, ast.Assign | ast.AnnAssign) and filling.isdisjoint(
        _called(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)
    )
    kind = "unknown" if reads else "known" if is_known else "computed" if is_computed else "unknown"
    return _Step(kind, "", None, node.lineno)


def _is_harmless(function: ast.expr) -> bool:
    return _called(function) in _HARMLESS


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
