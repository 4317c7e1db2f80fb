"""What the statements of a block do to an optimizer's parameters: clear their gradients, hand their values on."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from gradsan.source.flow.scopes import flag_owner
from gradsan.source.identifiers import leaf_name, parameters
from gradsan.source.rewrite.given import have_a_common_part, networks_of, stepped_optimizer
from gradsan.source.tree import FunctionNode, SourceFile

HANDING_ON = frozenset({"data", "state_dict", "load_state_dict", "parameters", "named_parameters"})
"""Attributes by which a statement reads the parameters of a network, or the values of one."""

_BY_HAND = frozenset({"zero_", "fill_", "_foreach_zero_"})


def clears(source: SourceFile, statements: Iterable[ast.stmt], optimizer: str) -> bool:
    """Whether a statement clears the gradients of what ``optimizer`` has; True, too, where that does not show.

    ``other.zero_grad()`` of another optimizer clears none of them, nor that of a network which this one was not given.
    """
    own = networks_of(source, optimizer)
    return any(
        one is None or one == optimizer or not _is_apart(source, one, own) for one in _receivers(source, statements)
    )


def hands_on(source: SourceFile, statements: Iterable[ast.stmt], optimizer: str) -> bool:
    """Whether a statement reads the parameters of a network that ``optimizer`` was given, as an average of it does.

    Or it passes such a network to a function, or calls one of the file that names it and reads parameters. What is
    about gradients (clips, norms, clearing by hand) does not count. False where the file does not show the networks.
    """
    own = networks_of(source, optimizer)
    if not own:
        return False
    wanted = [one for one in statements if not _is_of_gradients(one)]
    calls = [one for statement in wanted for one in ast.walk(statement) if isinstance(one, ast.Call)]
    given = {source.text(one) for call in calls for one in call.args if isinstance(one, (ast.Name, ast.Attribute))}
    functions = [one for call in calls if (one := _function(source, call)) is not None and not _is_of_gradients(one)]
    read = {source.text(one) for statement in wanted for one in _handed_on(statement)}
    return not own.isdisjoint(read | given) or any(
        _names(source, one, own) and any(_handed_on(one)) for one in functions
    )


def _names(source: SourceFile, node: ast.AST, wanted: set[str]) -> bool:
    parts = (one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))
    return any(source.text(one) in wanted for one in parts)


def _handed_on(node: ast.AST) -> Iterator[ast.expr]:
    """What is read so, but by loops that freeze or unfreeze it."""
    loops = [one for one in ast.walk(node) if isinstance(one, ast.For) and all(map(flag_owner, one.body))]
    flagged = {part for one in loops for part in ast.walk(one.iter)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in HANDING_ON and part not in flagged:
            yield part.value


def _is_of_gradients(node: ast.AST) -> bool:
    """Whether a statement or a function clips gradients, or has to do with ``.grad``."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr == "grad")
        or (isinstance(part, ast.Call) and (leaf_name(part.func) or "").startswith("clip_grad"))
        for part in ast.walk(node)
    )


def _is_apart(source: SourceFile, receiver: str, own: set[str]) -> bool:
    """Whether ``receiver`` is another optimizer, without one of the networks ``own``, or a network beside them."""
    others = networks_of(source, receiver) or ({receiver} if own else set())
    if not others or not own:
        return _steps(source, receiver) and not own & others
    return not have_a_common_part(own, others)


def _steps(source: SourceFile, receiver: str) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "step" and source.text(node.value) == receiver)
        or (isinstance(node, ast.Expr) and stepped_optimizer(source, node) == receiver)
        for node in source.nodes
    )


def _receivers(source: SourceFile, statements: Iterable[ast.stmt], deep: bool = True) -> Iterator[str | None]:
    """Yield the expression whose gradients each clearing is of; None for one that is another thing in each call."""
    for node in (part for statement in statements for part in ast.walk(statement)):
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
            yield None
        if not isinstance(node, ast.Call):
            continue
        name = leaf_name(node.func)
        if isinstance(node.func, ast.Attribute) and name in _BY_HAND and leaf_name(node.func.value) == "grad":
            yield None
        elif isinstance(node.func, ast.Attribute) and name == "zero_grad":
            yield _constant(source, node.func.value)
        elif deep and name is not None and (function := _function(source, node)) is not None:
            yield from _receivers(source, function.body, deep=False)


def _constant(source: SourceFile, receiver: ast.expr) -> str | None:
    """The text of a receiver, if its name means the same wherever the file calls it so."""
    root = receiver
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return None
    function = source.function(receiver)
    is_local = function is not None and root.id in parameters(function) and root.id != "self"
    loops = (one for one in source.nodes if isinstance(one, (ast.For, ast.comprehension)))
    is_iterated = any(
        isinstance(part, ast.Name) and part.id == root.id for one in loops for part in ast.walk(one.target)
    )
    return None if is_local or is_iterated else source.text(receiver)


def _function(source: SourceFile, call: ast.Call) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The function of this file that a call by a bare name, or by ``self``, runs; None where it does not show."""
    func = call.func
    is_own = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
    if not (isinstance(func, ast.Name) or is_own):
        return None
    name, owner = leaf_name(func), source.owner_class(call) if is_own else None
    found: list[FunctionNode] = [
        one
        for one in source.nodes
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
        and one.name == name
        and (owner is None or source.owner_class(one) is owner)
    ]
    return found[0] if len(found) == 1 and not isinstance(found[0], ast.Lambda) else None
