"""Whether a name holds one tensor, several, or an object of the program's, as far as the file tells."""

from __future__ import annotations

import ast
from typing import Literal

from gradsan.source.chains import chain_key, leaf_name
from gradsan.source.modules import constructors
from gradsan.source.names import Binding, bindings_of
from gradsan.source.tree import SourceFile

__all__ = ["DETACHED", "Shape", "object_cut", "shape_in_source"]

Shape = Literal["tensor", "tuple", "list", "dict", "object"]

_MAKING_CLASSES = frozenset({"NamedTuple", "make_dataclass", "namedtuple"})

# An object has its own ways to be made anew: see object_cut.
DETACHED: dict[Shape, str] = {
    "tensor": "{}.detach()",
    "tuple": "tuple(s.detach() for s in {})",
    "list": "[s.detach() for s in {}]",
    "dict": "{{key: s.detach() for key, s in {}.items()}}",
}


def shape_in_source(source: SourceFile, binding: Binding) -> Shape | None:
    """What the name of ``binding`` holds: told by what else it is bound to, by being unpacked, or by an LSTM.

    None where the file does not tell, or tells different things.
    """
    scope: ast.AST = source.function(binding.statement) or source.module
    if "." in binding.name:
        scope = source.owner_class(binding.statement) or source.module
    found: set[Shape] = set()
    for node in ast.walk(scope):
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


def object_cut(source: SourceFile, name: str) -> tuple[list[str], list[str]] | None:
    """What is bound, and to what, where the object that ``name`` holds is cut off its graph.

    Named tuples are made anew, attributes of dataclasses are set; which of them hold tensors their annotations say.
    None for other classes, frozen ones, and where a field may hold more than one tensor.
    """
    last = name.rpartition(".")[2]
    made = {
        leaf_name(binding.value.func)
        for node in ast.walk(source.module)
        if isinstance(node, ast.stmt)
        for binding in bindings_of(node)
        if isinstance(binding.value, ast.Call)
        and binding.name.rpartition(".")[2] == last
        and isinstance(binding.value.func, ast.Name)
        and _is_object(source, binding.value)
    }
    if len(made) != 1:
        return None
    kind = made.pop()
    for node in source.module.body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            fields = _tensor_fields(node)
            if not fields:
                return None
            if "NamedTuple" in map(leaf_name, node.bases):
                return [name], [f"{name}._replace({', '.join(f'{one}={name}.{one}.detach()' for one in fields)})"]
            if _is_open_dataclass(node):
                return [f"{name}.{one}" for one in fields], [f"{name}.{one}.detach()" for one in fields]
        elif isinstance(node, ast.stmt) and _makes_class(node, kind or ""):
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and leaf_name(value.func) == "namedtuple":
                return [name], [f"{name}._make(s.detach() for s in {name})"]
    return None


def _tensor_fields(node: ast.ClassDef) -> list[str]:
    """The annotated fields that are tensors; none where one may be, or hold some."""
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


def _is_open_dataclass(node: ast.ClassDef) -> bool:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if leaf_name(decorator if call is None else call.func) == "dataclass":
            return call is None or not any(one.arg == "frozen" for one in call.keywords)
    return False


def _shape_of_display(value: ast.expr) -> Shape | None:
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
    """Whether ``value`` makes an object of a class of this file, or one like another (``dataclasses.replace``)."""
    if not isinstance(value, ast.Call):
        return False
    name = leaf_name(value.func)
    if name == "_replace" or (name == "replace" and len(value.args) == 1 and value.keywords):
        return True
    return isinstance(value.func, ast.Name) and any(
        (isinstance(node, ast.ClassDef) and node.name == name and "Tensor" not in map(leaf_name, node.bases))
        or (isinstance(node, ast.stmt) and _makes_class(node, value.func.id))
        for node in source.module.body
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
