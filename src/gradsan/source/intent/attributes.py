"""Methods of classes: the attributes that a forward reads, where they are bound, and losses returned to a library."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.flow.cuts import Cut, cuts_of_value, mode_around, mode_of_decorators
from gradsan.source.flow.kept import frame_at_node
from gradsan.source.flow.scopes import Live, Scope
from gradsan.source.identifiers import chain_key, is_name, leaf_name, local_nodes, parameters
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_ALL_OF_THEM = frozenset({
    "children", "named_children", "modules", "named_modules", "parameters", "named_parameters", "state_dict",
    "get_submodule", "get_parameter", "_modules", "_parameters", "__dict__",
})  # fmt: skip
"""What of a module hands out its attributes under other names."""


@dataclass(frozen=True, slots=True)
class Used:
    """A place in a forward that reads an attribute; ``mode`` is the frame of the grad mode switched off around it."""

    frame: Frame
    mode: Frame | None


def uses_in(definition: Frame, attribute: str) -> tuple[Used, ...] | None:
    """The reads of ``self.<attribute>`` in the method at ``definition`` and in the methods of its class that it calls.

    None where the source does not decide whether there are any: the attribute may be read by a method of another class,
    by a function that is given the module, or among all of its attributes.
    """
    source = read_source(definition.file)
    function = None if source is None else _defined_at(source, definition)
    if source is None or function is None or not function.args.args:
        return None
    owner = source.owner_class(function)
    methods = {
        one.name: one for one in getattr(owner, "body", ()) if isinstance(one, ast.FunctionDef) and one.args.args
    }
    is_inherited = any(not (leaf_name(base) or "").endswith("Module") for base in getattr(owner, "bases", ()))
    waiting, met, found = [function], {function}, list[Used]()
    is_all_seen = not is_inherited
    while waiting:
        function = waiting.pop(0)
        own = function.args.args[0].arg
        reads = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and is_name(node.value, own)]
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        # A name that no attribute is read of hands on the module itself.
        is_handed_on = sum(one.id == own for one in names) > len(reads) or any(one.id == "super" for one in names)
        is_all_seen = is_all_seen and not is_handed_on and all(node.attr not in _ALL_OF_THEM for node in reads)
        for node in reads:
            called = methods.get(node.attr)
            if node.attr == attribute:
                mode = mode_around(source, node, function) or mode_of_decorators(function)
                place = None if mode is None else frame_at_node(source, definition, mode[1])
                found.append(Used(frame_at_node(source, definition, node), place))
            elif called is not None and called not in met:
                met.add(called)
                waiting.append(called)
    return tuple(found) if found or is_all_seen else None


def bound_in_class(definition: Frame, attribute: str) -> Frame | None:
    """The one statement of the class of the method at ``definition`` that binds ``self.<attribute>``, as a frame."""
    source = read_source(definition.file)
    function = None if source is None else _defined_at(source, definition)
    owner = None if source is None or function is None else source.owner_class(function)
    if source is None or owner is None:
        return None
    bound = [
        node
        for node in ast.walk(owner)
        if (isinstance(node, ast.Assign) and any(chain_key(one) == f"self.{attribute}" for one in node.targets))
        or (isinstance(node, ast.Expr) and _registers(node.value, attribute))
    ]
    return frame_at_node(source, definition, bound[0]) if len(bound) == 1 else None


def _registers(node: ast.expr, attribute: str) -> bool:
    """``self.register_buffer("<attribute>", …)``."""
    name = node.args[0] if isinstance(node, ast.Call) and node.args else None
    is_call = isinstance(node, ast.Call) and chain_key(node.func) == "self.register_buffer"
    return is_call and isinstance(name, ast.Constant) and name.value == attribute


def _defined_at(source: SourceFile, definition: Frame) -> FunctionNode | None:
    name = definition.function.rpartition(".")[2]
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first == definition.line:
                return node
    return None


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
