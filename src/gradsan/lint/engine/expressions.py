"""Expressions in the abstract interpreter, names and attributes."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable

from gradsan.lint.engine.attributes import Elements
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import layer_operation
from gradsan.lint.engine.values import (
    NO,
    Bag,
    Choice,
    ClassValue,
    Function,
    Layer,
    Memory,
    Object,
    Path,
    Plain,
    Sequence,
    Tensor,
    Value,
)
from gradsan.source.methods import METHODS

_WITHOUT = (ast.FloorDiv, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift, ast.Mod)
_BUILTINS = frozenset(dir(builtins))
_NO_TENSORS = frozenset({"list", "tuple", "dict", "set", "int", "float", "bool", "str", "bytes"})
_WORDS = (str, bool, type(None))
_NO_MODULES = _NO_TENSORS | {"Tensor", "Parameter"}


class Expressions(Elements):
    """Interpreter of expressions."""

    def evaluate(self, node: ast.expr, state: State) -> Value:
        handler = _HANDLERS.get(type(node))
        return Plain() if handler is None else handler(self, node, state)

    def _constant(self, node: ast.Constant, state: State) -> Value:
        return Plain(node.value, True)

    def _name(self, node: ast.Name, state: State) -> Value:
        name = node.id
        for number in self.frames[-1].chain:
            value = state.names.get((number, name))
            if value is not None:
                return value
        if name in _BUILTINS:
            return Path(f"builtins.{name}")
        if name == "__name__":
            return Plain("__main__", True)
        made = self.fresh(text=name)
        state.names[self.frames[-1].chain[-1], name] = made
        return made

    def _attribute(self, node: ast.Attribute, state: State) -> Value:
        return self.attribute(self.evaluate(node.value, state), node.attr, node, state)

    # -- calls

    def _call(self, node: ast.Call, state: State) -> Value:
        if isinstance(node.func, ast.Attribute) and _is_super(node.func.value):
            return self._super(node, state)
        outer = self._parent_call
        self._parent_call = node
        callee = self.evaluate(node.func, state)
        self._parent_call = None
        args: list[Value] = []
        for one in node.args:
            if isinstance(one, ast.Starred):
                args += self.items_of(self.evaluate(one.value, state), state)
            else:
                args.append(self.evaluate(one, state))
        keywords: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, state)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            else:
                entries = state.heap.get((value, "@entries"))
                keywords |= (
                    {key: one for key, one in entries.items() if isinstance(key, str)}
                    if isinstance(entries, dict)
                    else {}
                )
        self._parent_call = outer
        return self.call(callee, args, keywords, node, state)

    def _super(self, node: ast.Call, state: State) -> Value:
        assert isinstance(node.func, ast.Attribute)
        frame = self.frames[-1]
        args = [self.evaluate(one, state) for one in node.args if not isinstance(one, ast.Starred)]
        keywords = {one.arg: self.evaluate(one.value, state) for one in node.keywords if one.arg}
        me = frame.me
        if frame.owner is None or not isinstance(me, Object):
            return self.fresh()
        function = self.find_function(me.kind, node.func.attr, behind=frame.owner)
        if function is not None:
            return self.run_function(function, args, keywords, state, me)
        layer = state.heap.get((me, "@layer"))
        if node.func.attr == "forward" and isinstance(layer, Layer):
            return self.call_layer(layer, args, node, state)
        return self.fresh() if node.func.attr != "__init__" else Plain(None, True)

    # -- operators

    def _binary(self, node: ast.BinOp, state: State) -> Value:
        left, right = self.evaluate(node.left, state), self.evaluate(node.right, state)
        return self.compute(node.op, left, right, node, state)

    def compute(self, operator: ast.operator, left: Value, right: Value, node: ast.AST, state: State) -> Value:
        """The result of a binary operator."""
        tensors = [one for one in (self.tensor_of(left), self.tensor_of(right)) if one is not None]
        if isinstance(operator, ast.Add | ast.Mult) and (isinstance(left, Sequence) or isinstance(right, Sequence)):
            made = Sequence("list")
            state.heap[made, "@items"] = (*self.items_of(left, state), *self.items_of(right, state))[:60]
            return made
        if not tensors:
            return Plain()
        if isinstance(operator, _WITHOUT):
            return self.fresh(certain=any(one.is_certain for one in tensors), grad=NO)
        if all(one.is_array for one in tensors):
            return Tensor((Memory(),), NO, None, self.tick(), is_certain=False, is_cut=True, is_array=True)
        certain = any(one.is_certain for one in tensors)
        name, both = METHODS[type(operator)], [left, right]
        made2 = self._power(both, node, state) if name == "pow" else self.apply(name, both, node, state)
        made2.is_certain = certain
        return made2

    def _unary(self, node: ast.UnaryOp, state: State) -> Value:
        value = self.evaluate(node.operand, state)
        tensor = self.tensor_of(value)
        if isinstance(node.op, ast.Not):
            known = self.constant(value)
            return Plain(not known, True) if known is not ... else Plain()
        if tensor is None:
            known = self.constant(value)
            if isinstance(node.op, ast.USub) and isinstance(known, int | float):
                return Plain(-known, True)
            return Plain()
        if isinstance(node.op, ast.Invert):
            return self.fresh(certain=True, grad=NO)
        made = self.apply("neg", [tensor], node, state)
        made.is_certain = tensor.is_certain
        return made

    def _compare(self, node: ast.Compare, state: State) -> Value:
        values = [self.evaluate(one, state) for one in (node.left, *node.comparators)]
        if any(self.tensor_of(one) is not None for one in values):
            return self.fresh(certain=any(isinstance(one, Tensor) and one.is_certain for one in values), grad=NO)
        return Plain()

    def _bool(self, node: ast.BoolOp, state: State) -> Value:
        found: Value | None = None
        for one in node.values:
            value = self.evaluate(one, state)
            if isinstance(node.op, ast.Or) and isinstance(value, Plain) and value.known and not value.value:
                continue
            found = value if found is None else self.merge(found, value, state.branches)
        return Plain(None, True) if found is None else found

    def _if(self, node: ast.IfExp, state: State) -> Value:
        known = self.truth(node.test, state)
        if known is not None:
            return self.evaluate(node.body if known else node.orelse, state)
        branches = state.branches
        there = state.copy()
        there.branches = (*branches, (id(node), 0))
        one = self.evaluate(node.body, there)
        state.branches = (*branches, (id(node), 1))
        other = self.evaluate(node.orelse, state)
        both = self.merge(one, other, branches, (there.branches, state.branches))
        left = self.join(there, state, branches)
        if left is not None and left is not state:
            state.become(left)
        return both

    def truth(self, node: ast.expr, state: State) -> bool | None:
        """Whether a condition holds; None where the source does not decide it."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, state)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(one, state) for one in node.values]
            decisive = isinstance(node.op, ast.Or)
            if decisive in parts:
                return decisive
            return None if None in parts else not decisive
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison(node, state)
        asked = self.asked_class(node, state)
        if asked is not None:
            return is_instance(self.evaluate(asked[0], state), asked[1])
        value = self.evaluate(node, state)
        if isinstance(value, Plain) and value.known and isinstance(value.value, bool | str | None):
            return bool(value.value)
        if isinstance(value, Layer | Object | Function | ClassValue):
            return True
        return None

    def asked_class(self, node: ast.expr, state: State) -> tuple[ast.expr, frozenset[str]] | None:
        """The value and the classes' names that ``isinstance``, ``is_tensor``, ``hasattr(x, "requires_grad")`` ask for.

        An unknown class is ``""``.
        """
        if not isinstance(node, ast.Call) or node.keywords:
            return None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "is_tensor" and len(node.args) == 1:
            return node.args[0], frozenset({"Tensor"})
        if name == "hasattr" and [getattr(one, "value", None) for one in node.args[1:]] == ["requires_grad"]:
            return node.args[0], frozenset({"Tensor"})
        if name != "isinstance" or len(node.args) != 2:
            return None
        classes = self.evaluate(node.args[1], state)
        kinds = self.items_of(classes, state) if isinstance(classes, Sequence) else [classes]
        return node.args[0], frozenset(one.name.rpartition(".")[2] if isinstance(one, Path) else "" for one in kinds)

    def _comparison(self, node: ast.Compare, state: State) -> bool | None:
        left, right = self.evaluate(node.left, state), self.evaluate(node.comparators[0], state)
        operator = node.ops[0]
        if (
            isinstance(operator, ast.Is | ast.IsNot)
            and isinstance(right, Plain)
            and right.known
            and right.value is None
        ):
            if isinstance(left, Plain):
                return (left.value is None) == isinstance(operator, ast.Is) if left.known else None
            if isinstance(left, Choice) or (isinstance(left, Tensor) and not left.is_certain):
                return None
            return isinstance(operator, ast.IsNot)
        one, other = self.constant(left), self.constant(right)
        is_text = isinstance(one, str) or isinstance(other, str)
        if isinstance(operator, ast.Eq | ast.NotEq) and is_text and all(isinstance(v, _WORDS) for v in (one, other)):
            return (one == other) == isinstance(operator, ast.Eq)
        return None

    # -- containers

    def _named(self, node: ast.NamedExpr, state: State) -> Value:
        value = self.evaluate(node.value, state)
        self.assign(node.target, value, state)
        return value

    def _lambda(self, node: ast.Lambda, state: State) -> Value:
        return Function(node, self.frames[-1].chain)

    def _wrapped(self, node: ast.Starred | ast.Await, state: State) -> Value:
        return self.evaluate(node.value, state)

    def _yield(self, node: ast.Yield, state: State) -> Value:
        value = Plain() if node.value is None else self.evaluate(node.value, state)
        self.frames[-1].yielded.append(value)
        return Plain()

    def _text_parts(self, node: ast.JoinedStr, state: State) -> Value:
        return Plain("", False)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


_HANDLERS: dict[type[ast.expr], Callable[..., Value]] = {
    ast.Constant: Expressions._constant,
    ast.Name: Expressions._name,
    ast.Attribute: Expressions._attribute,
    ast.Call: Expressions._call,
    ast.BinOp: Expressions._binary,
    ast.UnaryOp: Expressions._unary,
    ast.Compare: Expressions._compare,
    ast.BoolOp: Expressions._bool,
    ast.IfExp: Expressions._if,
    ast.Tuple: Expressions._sequence,
    ast.List: Expressions._sequence,
    ast.Set: Expressions._sequence,
    ast.Dict: Expressions._dictionary,
    ast.Subscript: Expressions._element,
    ast.ListComp: Expressions._comprehension,
    ast.SetComp: Expressions._comprehension,
    ast.GeneratorExp: Expressions._comprehension,
    ast.DictComp: Expressions._comprehension,
    ast.NamedExpr: Expressions._named,
    ast.Lambda: Expressions._lambda,
    ast.Starred: Expressions._wrapped,
    ast.Await: Expressions._wrapped,
    ast.Yield: Expressions._yield,
    ast.JoinedStr: Expressions._text_parts,
}


def is_instance(value: Value, classes: frozenset[str]) -> bool | None:
    """Whether a value is an instance of one of the classes of these names; None where the source does not decide it."""
    if isinstance(value, Tensor) and value.is_certain and not value.is_array:
        return True if "Tensor" in classes else False if classes and classes <= _NO_TENSORS else None
    if not (isinstance(value, Layer | Bag) or (isinstance(value, Object) and value.kind.is_module)):
        return None
    if "Module" in classes or (isinstance(value, Layer) and value.kind in classes):
        return True
    if classes and classes <= _NO_MODULES:
        return False
    if isinstance(value, Layer) and classes and all(layer_operation(name) is not None for name in classes):
        return False
    return None
