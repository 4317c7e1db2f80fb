"""Order of clearing, clipping, backward and step in one block: gradients cleared or clipped in vain.

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


def in_vain(body: list[ast.stmt], module: ast.Module) -> Iterator[InVain]:
    """Yield the calls of ``body`` that clear gradients before their step, or clip before their backward."""
    if sum(_kind(one) in ("backward", "step", "clear") for one in body) < 3:
        return
    steps = [_step(one) for one in body]
    for place, backward in enumerate(steps):
        cleared = _next(steps, place, "clear") if backward.kind == "backward" else None
        step = None if cleared is None else _next(steps, cleared, "step")
        if cleared is not None and step is not None and steps[step].owner == steps[cleared].owner:
            call = steps[cleared].call
            if call is not None:
                values: dict[str, object] = {"name": steps[cleared].owner, "line": backward.at}
                yield InVain("GS424", "gradient_cleared", call, values)
    told = [one for one in steps if one.kind not in ("known", "unknown")]
    for clear, clip, backward, later in zip(told, told[1:], told[2:], told[3:], strict=False):
        is_early = [clear.kind, clip.kind, backward.kind, later.kind] == ["clear", "clip", "backward", "step"]
        if is_early and clip.call is not None and _belongs(clip.call, clear.owner, later.owner, module):
            yield InVain("GS425", "clip_without_effect", clip.call, {"name": clip.owner, "line": backward.at})


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
    function = call.func
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return _KINDS.get(name)


def _step(node: ast.stmt) -> _Step:
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
    return _Step("known" if is_known and not reads else "unknown", "", None, node.lineno)


def _is_harmless(function: ast.expr) -> bool:
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) in _HARMLESS
