"""Modules that a call reaches, layers that work in place, and the kinds of value that a name holds, within one file."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import product
from typing import TypeAlias

from gradsan.heuristics import is_activation
from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import (
    Binding,
    bindings_in,
    bindings_of,
    chain_key,
    constant_key,
    imported_as,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import expression_at
from gradsan.source.tree import SourceFile, read_source

_CONTAINERS = frozenset({"Sequential", "ModuleList"})
_MAX_DEPTH = 4


def is_elementwise_module(source: SourceFile, callee: ast.expr) -> bool:
    """Whether ``callee`` is a module of one activation or dropout, so that it writes into its argument.

    Decided by the file's assignments to that name; only where there are none, by the name itself.
    """
    values = constructors(source, callee)
    calls = [value for value in values if isinstance(value, ast.Call)]
    if calls:
        return all(leaf_name(call.func) in _POSITIONS for call in calls)
    return is_activation(leaf_name(callee) or "")


def constructors(source: SourceFile, callee: ast.expr, depth: int = 0) -> list[ast.expr]:
    """The values assigned to ``callee``: to ``self.act`` in its class, to a name in the file; all branches of a choice.

    Follows an index or a ``for`` into a list, ``nn.Sequential`` or ``nn.ModuleList`` written out in the file.
    """
    if depth > _MAX_DEPTH:
        return []
    if isinstance(callee, ast.Subscript):
        index = constant_key(callee.slice)
        elements = _elements(source, callee.value, depth)
        if isinstance(index, int) and -len(elements) <= index < len(elements):
            return _branches(elements[index])
        return [branch for element in elements for branch in _branches(element)]
    key = chain_key(callee)
    if key is None:
        return []
    within = source.owner_class(callee) if key.startswith("self.") else None
    found: list[ast.expr] = []
    for node in source.nodes if within is None else ast.walk(within):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            values = [one.value for one in bindings_of(node) if one.name == key and one.value is not None]
            found.extend(branch for value in values for branch in _branches(value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and chain_key(node.target) == key:
            found.extend(branch for item in _elements(source, node.iter, depth) for branch in _branches(item))
    return found


def _elements(source: SourceFile, container: ast.expr, depth: int) -> list[ast.expr]:
    values = [container] if isinstance(container, ast.List | ast.Tuple) else constructors(source, container, depth + 1)
    found: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.List | ast.Tuple):
            found.extend(value.elts)
        elif isinstance(value, ast.Call) and leaf_name(value.func) in _CONTAINERS:
            for argument in value.args:
                found.extend(argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument])
    return found


def _branches(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.IfExp):
        return [*_branches(value.body), *_branches(value.orelse)]
    if isinstance(value, ast.BoolOp):
        return [branch for operand in value.values for branch in _branches(operand)]
    return [value]


# Layers of one activation or dropout: the position of ``inplace`` among their arguments (2.6 to 2.13).
_AT = {0: "Hardsigmoid Hardswish Mish ReLU ReLU6 SELU SiLU", 2: "Hardtanh RReLU Threshold"}
_AT[1] = "AlphaDropout CELU Dropout Dropout1d Dropout2d Dropout3d ELU FeatureAlphaDropout LeakyReLU"
# Their functions take the input first.
_AT[1] += " hardsigmoid hardswish mish relu relu6 selu silu"
_AT[2] += " celu elu leaky_relu"
_AT[3] = "alpha_dropout dropout dropout1d dropout2d dropout3d feature_alpha_dropout hardtanh threshold"
_AT[4] = "rrelu"
_POSITIONS = {name: position for position, names in _AT.items() for name in names.split()}


def in_place_argument(call: ast.Call, *, is_known: bool = False) -> ast.expr | None:
    """The ``True`` in ``call`` that makes a layer work in place, as a keyword or positional argument.

    Where it ``is_known`` that the layer does, any value but ``False`` has been true: ``inplace=self.fast``.
    """
    position = _POSITIONS.get(leaf_name(call.func) or "")
    values = [keyword.value for keyword in call.keywords if keyword.arg == "inplace"]
    if position is not None and len(call.args) > position:
        before = call.args[: position + 1]
        values += [] if any(isinstance(argument, ast.Starred) for argument in before) else [call.args[position]]
    if is_known and not any(isinstance(value, ast.Constant) for value in values):
        return next(iter(values), None)
    return next((value for value in values if isinstance(value, ast.Constant) and value.value is True), None)


def inplace_layer_false(file: str, layer: str) -> Change | None:
    """``False`` where ``file`` makes a ``layer`` (``LeakyReLU``) that works in place; None unless there is just one."""
    found = inplace_layers_false(file, layer)
    return found[0] if len(found) == 1 else None


def inplace_layers_false(file: str, layer: str) -> tuple[Change, ...]:
    """``False`` at each place where ``file`` makes a ``layer`` that works in place; last, if several, at all of them.

    A ``functools.partial`` of the layer counts, and so does a name or an element that holds a class
    (``act(inplace=True)``). Flags that are no constants count where there are no others. Empty where there is none.
    """
    source = read_source(file)
    if source is None:
        return ()
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and _makes(node, layer)]
    literal = {value for call in calls if (value := in_place_argument(call)) is not None}
    flags = {value for call in calls if (value := in_place_argument(call, is_known=True)) is not None}
    values = sorted(literal or flags, key=source.span)
    edits = [Edit(source.span(value), "False") for value in values]
    choices = [[edit] for edit in edits] + ([edits] if len(edits) > 1 else [])
    return tuple(change for choice in choices if (change := edited(source, choice, "inplace_false")) is not None)


def inplace_attribute_false(file: str) -> Change | None:
    """``False`` wherever ``file`` sets the attribute ``inplace`` of something to ``True``; None where it does not."""
    source = read_source(file)
    if source is None:
        return None
    values: list[ast.expr] = []
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "inplace" for target in node.targets
        ):
            values.append(node.value)
        elif isinstance(node, ast.Call) and leaf_name(node.func) == "setattr" and len(node.args) == 3:
            named = node.args[1]
            values += [node.args[2]] if isinstance(named, ast.Constant) and named.value == "inplace" else []
    edits = [Edit(source.span(value), "False") for value in values if getattr(value, "value", None) is True]
    return edited(source, edits, "inplace_false")


def _makes(call: ast.Call, layer: str) -> bool:
    name = leaf_name(call.func)
    if name == "partial":
        return bool(call.args) and leaf_name(call.args[0]) == layer
    is_held = isinstance(call.func, ast.Name | ast.Subscript | ast.Call)
    return name == layer or (is_held and name not in _POSITIONS and layer in _POSITIONS)


Shape: TypeAlias = str
"""``tensor``, ``object``, or the nested containers from the outside in: ``dict``, ``dict/tuple``."""

_MAKING_CLASSES = frozenset({"NamedTuple", "make_dataclass", "namedtuple"})

_JOINING = frozenset({"cat", "concat", "dstack", "hstack", "pad_sequence", "stack", "vstack"})
_GIVING_SEVERAL = frozenset(
    {"aminmax", "chunk", "cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "numpy", "sort", "split"}
    | {"tensor_split", "tolist", "topk", "unbind", "unique"}
)


def _detached(kinds: tuple[str, ...], value: str) -> str:
    if not kinds:
        return f"{value}.detach()"
    item, key = (("s", "key"), ("part", "name"), ("parts", "group"))[len(kinds) - 1]
    inner = _detached(kinds[1:], item)
    if kinds[0].endswith("dict"):
        # A display would lose what a defaultdict makes for a missing key.
        kept = f"{value} | " if kinds[0] == "defaultdict" else ""
        return f"{kept}{{{{{key}: {inner} for {key}, {item} in {value}.items()}}}}"
    each, made = f"{inner} for {item} in {value}", {"tuple": "tuple", "namedtuple": f"{value}._make"}
    return f"[{each}]" if kinds[0] == "list" else f"{made[kinds[0]]}({each})"


_HOLDING = ("tuple", "namedtuple", "list", "dict", "defaultdict")
# Objects are made anew in other ways: see object_cut.
DETACHED: dict[Shape, str] = {"tensor": "{}.detach()"} | {
    "/".join(kinds): _detached(kinds, "{0}") for deep in (1, 2, 3) for kinds in product(_HOLDING, repeat=deep)
}


def shape_in_source(source: SourceFile, binding: Binding) -> Shape | None:
    """The kind of value that the name of ``binding`` holds, by its other bindings, by unpacking, or by an LSTM call.

    ``logps = torch.stack(logps)`` shows itself that the list of before is now a tensor. None where the file does not
    show it, or is contradictory.
    """
    if binding.replaces and isinstance(binding.statement, ast.Assign) and _is_joined(binding.value):
        return "tensor"
    # A variable of a nested function is another one; an attribute is set in any method.
    nodes: Iterable[ast.AST] = local_nodes(source.function(binding.statement) or source.module)
    if "." in binding.name:
        nodes = ast.walk(source.owner_class(binding.statement) or source.module)
    found: set[Shape] = set()
    for node in nodes:
        if not isinstance(node, ast.stmt):
            continue
        for other in bindings_of(node):
            if other.name == binding.name and other.replaces and other.value is not None:
                shape = "object" if _is_object(source, other.value) else _shape_of_display(other.value)
                found |= set() if shape is None else {shape}
        if isinstance(node, ast.Assign) and chain_key(node.value) == binding.name:
            found |= {"tuple" for target in node.targets if isinstance(target, ast.Tuple)}
    if _is_state_of_lstm(source, binding):
        found.add("tuple")
    return found.pop() if len(found) == 1 else None


def _is_joined(value: ast.AST | None) -> bool:
    """Whether ``value`` is one tensor made of several: ``torch.stack(xs)``, ``torch.cat(xs).view(-1)[1:] / n``."""
    if isinstance(value, ast.BinOp):
        return _is_joined(value.left) or _is_joined(value.right)
    if isinstance(value, ast.Subscript | ast.UnaryOp):
        return _is_joined(value.value if isinstance(value, ast.Subscript) else value.operand)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute | ast.Name):
        return False
    is_method = isinstance(value.func, ast.Attribute) and _is_joined(value.func.value)
    return leaf_name(value.func) in _JOINING or (is_method and leaf_name(value.func) not in _GIVING_SEVERAL)


def detached_form(source: SourceFile, name: str, shape: Shape) -> str:
    """The template that detaches ``{}``, the value of ``name``: a new leaf where the file calls ``grad`` for it."""
    asked = (
        one
        for call in source.nodes
        if isinstance(call, ast.Call) and leaf_name(call.func) == "grad"
        for given in [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "inputs")]
        for one in (given.elts if isinstance(given, ast.List | ast.Tuple) else [given])
    )
    is_leaf = shape == "tensor" and any(chain_key(one) == name for one in asked)
    return f"{DETACHED[shape]}.requires_grad_()" if is_leaf else DETACHED[shape]


def object_cut(source: SourceFile, name: str) -> tuple[list[str], list[str]] | None:
    """The targets to bind, and their new values, that detach the object that ``name`` holds.

    Named tuples and frozen dataclasses are made anew, attributes of others are set; annotations say which of them are
    tensors. None for other classes, and where a field may hold more than one tensor.
    """
    last = name.rpartition(".")[2]
    made = {
        leaf_name(binding.value.func)
        for binding in bindings_in(source.nodes)
        if isinstance(binding.value, ast.Call)
        and binding.name.rpartition(".")[2] == last
        and isinstance(binding.value.func, ast.Name)
        and _is_object(source, binding.value)
    }
    if len(made) != 1:
        return None
    kind = made.pop()
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            fields = _tensor_fields(node)
            if not fields:
                return None
            if "NamedTuple" in map(leaf_name, node.bases):
                return [name], [f"{name}._replace({', '.join(f'{one}={name}.{one}.detach()' for one in fields)})"]
            settings = _settings_of_dataclass(node)
            if settings is None:
                return None
            if "frozen" not in settings:
                return [f"{name}.{one}" for one in fields], [f"{name}.{one}.detach()" for one in fields]
            anew = _made_anew(source, node, name, fields)
            return None if anew is None or node.bases else ([name], [anew])
        if isinstance(node, ast.stmt) and _makes_class(node, kind or ""):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and leaf_name(value.func) == "namedtuple":
                return [name], [f"{name}._make(s.detach() for s in {name})"]
    return None


def _tensor_fields(node: ast.ClassDef) -> list[str]:
    """The annotated fields that are tensors; empty where any field may be, or contain, an unknown number of them."""
    fields: list[str] = []
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        annotation = ast.unparse(one.annotation).strip("'\"")
        if annotation.rpartition(".")[2] == "Tensor" and annotation.replace(".", "").isidentifier():
            fields.append(one.target.id)
        elif "Tensor" in annotation:
            return []
    return fields


def _settings_of_dataclass(node: ast.ClassDef) -> set[str] | None:
    """The arguments of the decorator that are not False; None where the class is not a dataclass."""
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if leaf_name(decorator if call is None else call.func) == "dataclass":
            given = [] if call is None else call.keywords
            off = {one.arg for one in given if isinstance(one.value, ast.Constant) and one.value.value is False}
            return {one.arg or "" for one in given} - {one or "" for one in off}
    return None


def _made_anew(source: SourceFile, node: ast.ClassDef, name: str, detached: list[str]) -> str | None:
    """The frozen dataclass ``name`` with fields detached: by ``replace`` where the file has it, else field by field."""
    given = [f"{one}={name}.{one}.detach()" for one in detached]
    package, replace = imported_as(source, "dataclasses"), imported_as(source, "dataclasses.replace")
    if package or replace:
        return f"{replace or f'{package}.replace'}({name}, {', '.join(given)})"
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    if any(isinstance(one.value, ast.Call) or "ClassVar" in ast.unparse(one.annotation) for one in fields):
        return None
    names = [one.target.id for one in fields if isinstance(one.target, ast.Name)]
    return f"{node.name}({', '.join(f'{one}={name}.{one}' + '.detach()' * (one in detached) for one in names)})"


def _shape_of_display(value: ast.expr) -> Shape | None:
    outer = _container_of_display(value)
    parts: list[ast.expr | None] = []
    if isinstance(value, ast.Tuple | ast.List):
        parts = list(value.elts)
    elif isinstance(value, ast.Dict | ast.DictComp):
        parts = list(value.values) if isinstance(value, ast.Dict) else [value.value]
    elif isinstance(value, ast.ListComp):
        parts = [value.elt]
    inner = {None if part is None else _container_of_display(part) for part in parts}
    nested = f"{outer}/{next(iter(inner))}" if len(inner) == 1 else ""
    return nested if nested in DETACHED else outer


def _container_of_display(value: ast.expr) -> Shape | None:
    if isinstance(value, ast.Tuple):
        return "tuple"
    if isinstance(value, ast.List | ast.ListComp):
        return "list"
    if isinstance(value, ast.Dict | ast.DictComp):
        return "dict"
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
    if is_call and isinstance(value, ast.Call) and leaf_name(value.func) == "tuple":
        return "tuple"
    return None


def _is_object(source: SourceFile, value: ast.expr) -> bool:
    """Whether ``value`` makes an object of a class of this file, or a modified copy (``dataclasses.replace``)."""
    if not isinstance(value, ast.Call):
        return False
    name = leaf_name(value.func)
    if name == "_replace" or (name == "replace" and len(value.args) == 1 and value.keywords):
        return True
    return isinstance(value.func, ast.Name) and any(
        (isinstance(node, ast.ClassDef) and node.name == name and "Tensor" not in map(leaf_name, node.bases))
        or (isinstance(node, ast.stmt) and _makes_class(node, value.func.id))
        for node in source.nodes
    )


def _makes_class(statement: ast.stmt, name: str) -> bool:
    return any(
        one.name == name and isinstance(one.value, ast.Call) and leaf_name(one.value.func) in _MAKING_CLASSES
        for one in bindings_of(statement)
    )


def _is_state_of_lstm(source: SourceFile, binding: Binding) -> bool:
    """Whether the statement is ``_, name = lstm(…)`` or ``name = lstm_cell(…)``."""
    statement = binding.statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    target = statement.targets[0]
    is_second = isinstance(target, ast.Tuple) and len(target.elts) == 2 and chain_key(target.elts[1]) == binding.name
    is_whole = chain_key(target) == binding.name
    made = constructors(source, statement.value.func)
    names = {leaf_name(value.func) for value in made if isinstance(value, ast.Call)}
    return (is_second and names == {"LSTM"}) or (is_whole and names == {"LSTMCell"})


def state_given(frame: Frame) -> str | None:
    """``network`` of ``target.load_state_dict(network.state_dict())`` at ``frame``; None for any other call."""
    found = expression_at(frame)
    given = found.node.args[:1] if found is not None and isinstance(found.node, ast.Call) else ()
    called = [one.func for one in given if isinstance(one, ast.Call)]
    owners = [one.value for one in called if isinstance(one, ast.Attribute) and one.attr == "state_dict"]
    return chain_key(owners[0]) if owners else None
