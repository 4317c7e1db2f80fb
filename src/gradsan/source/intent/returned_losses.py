"""Functions that return a loss to a library, which differentiates it, and the cuts by which that has no graph."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from gradsan.source.flow.cuts import Cut, cuts_of_value
from gradsan.source.flow.scopes import Live, Scope
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes, parameters
from gradsan.source.tree import SourceFile, read_source

_RETURN_A_LOSS = frozenset({"compute_loss", "training_step"})
"""Methods that Lightning, and the Trainer of transformers, call for a loss."""


def cuts_of_returned_loss(files: Iterable[str]) -> tuple[Cut, ...]:
    """The cuts of the one loss without a graph that such methods in ``files`` return; empty where there are several.

    Nothing is known of a call that has returned: what is called and is no method counts as a network that is trained.
    """
    sources = filter(None, map(read_source, dict.fromkeys(files)))
    followed = (cuts_of_value([value], scope) for source in sources for value, scope in _losses(source))
    found = [cuts for may_require, cuts in followed if cuts and not may_require]
    return found[0] if len(found) == 1 else ()


def _losses(source: SourceFile) -> Iterator[tuple[ast.expr, Scope]]:
    methods = (one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name in _RETURN_A_LOSS)
    for method in methods:
        owner = source.parents[method][0]
        if not isinstance(owner, ast.ClassDef):
            continue
        nodes = list(local_nodes(method))
        if any(isinstance(one, ast.Call) and (leaf_name(one.func) or "").endswith("backward") for one in nodes):
            # It differentiates the loss itself, and returns a number for the log.
            continue
        live = Live(dict.fromkeys(_networks(owner, method), True))
        for node in nodes:
            if isinstance(node, ast.Return) and node.value is not None:
                yield _loss_in(node.value), Scope(source, method, node, live)


def _networks(owner: ast.ClassDef, method: ast.FunctionDef) -> Iterator[str]:
    """What the class calls that is no method of its own: ``self.net(x)``, ``model(x)`` for an argument, ``self(x)``."""
    own = {f"self.{one.name}" for one in owner.body if isinstance(one, ast.FunctionDef)}
    for call in (one for one in ast.walk(owner) if isinstance(one, ast.Call)):
        key = chain_key(call.func) or ""
        if (key.startswith("self.") and key not in own) or key in parameters(method):
            yield key


def _loss_in(value: ast.expr) -> ast.expr:
    """``loss`` of ``(loss, outputs) if return_outputs else loss``, and of ``{"loss": loss}``."""
    if isinstance(value, ast.IfExp):
        return _loss_in(value.orelse)
    if isinstance(value, ast.Tuple) and value.elts:
        return _loss_in(value.elts[0])
    if isinstance(value, ast.Dict):
        pairs = zip(value.keys, value.values, strict=True)
        return next((one for key, one in pairs if isinstance(key, ast.Constant) and key.value == "loss"), value)
    return value
