"""Expressions in the post-mortem analysis: their values, and the effects of their operators on memory."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from gradsan.graph.live import own_attribute
from gradsan.postmortem import lookup
from gradsan.postmortem.calls import Calls
from gradsan.postmortem.lookup import UNKNOWN, Bound, Closure, Namespace, Value, joined, made, of_thing
from gradsan.source.methods import METHODS, special_name

_ELEMENTS_READ = 12
_ROUNDS = 2


class Expressions(Calls):
    """Interpreter of expressions and assignments."""

    def value(self, node: ast.expr, space: Namespace) -> Value:
        """The value of ``node``, once its events are in the script."""
        if isinstance(node, ast.Constant):
            return Value(node.value)
        if isinstance(node, ast.Name):
            return lookup.name(space, node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, space)
        if isinstance(node, ast.Call):
            return self.call(node, space)
        if isinstance(node, ast.BinOp):
            operands = [self.value(node.left, space), self.value(node.right, space)]
            return self._computed(METHODS[type(node.op)], operands, node, space)
        if isinstance(node, ast.UnaryOp):
            operand = self.value(node.operand, space)
            return self._computed("neg" if isinstance(node.op, ast.USub) else "?", [operand], node, space)
        if isinstance(node, ast.Subscript):
            return self._element(node, space)
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return Value(items=[self.value(element, space) for element in node.elts])
        if isinstance(node, ast.Dict):
            for key in node.keys:
                if key is not None:
                    self.value(key, space)
            keys = [key.value if isinstance(key, ast.Constant) else UNKNOWN for key in node.keys]
            return Value(items=[self.value(one, space) for one in node.values], kind=keys)
        if isinstance(node, ast.IfExp):
            known = self.truth(node.test, space)
            if known is not None:
                return self.value(node.body if known else node.orelse, space)
            return joined([self.value(node.body, space), self.value(node.orelse, space)])
        if isinstance(node, ast.BoolOp):
            return joined([self.value(one, space) for one in node.values])
        if isinstance(node, ast.Compare):
            for one in (node.left, *node.comparators):
                self.value(one, space)
            return made()
        if isinstance(node, ast.Starred | ast.Await):
            return self.value(node.value, space)
        if isinstance(node, ast.JoinedStr):
            return self._text(node, space)
        if isinstance(node, ast.Yield):
            self.yielded.append(Value(None) if node.value is None else self.value(node.value, space))
            return Value()
        if isinstance(node, ast.YieldFrom):
            value = self.value(node.value, space)
            self.yielded += value.items or []
            return Value()
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value, space)
            self.assign(node.target, value, space)
            return value
        if isinstance(node, ast.Lambda):
            return Value(Closure(node, space, f"{space.qualname}.<locals>.<lambda>"))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, space)
        return Value()

    def _text(self, node: ast.JoinedStr, space: Namespace) -> Value:
        """An f-string, known where all of its parts are: the name of a method that ``getattr`` looks up."""
        parts = [self.value(one.value if isinstance(one, ast.FormattedValue) else one, space) for one in node.values]
        texts = [one.thing for one in parts if one.is_known and isinstance(one.thing, str | int)]
        return Value("".join(map(str, texts))) if len(texts) == len(parts) else Value()

    def _attribute(self, node: ast.Attribute, space: Namespace) -> Value:
        inner = node.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super":
            return lookup.of_parent(space, node.attr)
        owner = self.value(inner, space)
        given = self.fields.get(id(owner.thing), {}).get(node.attr) if owner.is_known else None
        if given is not None:
            return given
        found = lookup.attribute(owner, node.attr)
        method = found.thing
        if isinstance(method, Bound) and isinstance(method.function, property):
            return self.called(of_thing(method.function.fget), [method.owner], {}, node, space)
        return found

    def _computed(self, name: str, operands: list[Value], node: ast.expr, space: Namespace) -> Value:
        if all(one.is_known and isinstance(one.thing, lookup.NUMBERS) for one in operands):
            return Value()
        if any(one.items is not None for one in operands):
            return Value(items=[item for one in operands for item in one.items or ()])
        result = made()
        self.note("op", name, node, space, operands=operands, result=result)
        return result

    def _element(self, node: ast.Subscript, space: Namespace) -> Value:
        owner = self.value(node.value, space)
        key = _constant(node.slice)
        if key is UNKNOWN and not isinstance(node.slice, ast.Slice):
            index = self.value(node.slice, space)
            if index.is_known and isinstance(index.thing, int | str):
                key = index.thing
        if owner.items is not None:
            if isinstance(node.slice, ast.Slice):
                return owner
            return _item(owner, key)
        if owner.is_known and not torch.is_tensor(owner.thing):
            return lookup.element(owner, key)
        view = Value(memory=owner.memory)
        self.note("op", "getitem", node, space, operands=[owner], result=view)
        return view

    def _comprehension(self, node: Any, space: Namespace) -> Value:
        inner = Namespace(space.file, space.qualname, {}, {}, space, space.module)
        found: list[Value] = []
        first = node.generators[0]
        start = 0
        for item in self.rounds_of(first.iter, space):
            start = len(self.script.events)
            self.assign(first.target, item, inner)
            for further in node.generators[1:]:
                for inner_item in self.rounds_of(further.iter, inner)[:1]:
                    self.assign(further.target, inner_item, inner)
            found.append(self.value(node.value if isinstance(node, ast.DictComp) else node.elt, inner))
        self.script.note_round(start)
        return Value(items=found)

    def assign(self, target: ast.expr, value: Value, space: Namespace) -> None:
        """Assign ``value`` to ``target``; a tensor written by index is a write."""
        if isinstance(target, ast.Name):
            space.names[target.id] = lookup.live_instead(space.live.get(target.id, UNKNOWN), value)
        elif isinstance(target, ast.Tuple | ast.List):
            for position, element in enumerate(target.elts):
                inner = element.value if isinstance(element, ast.Starred) else element
                self.assign(inner, _part(value, position), space)
        elif isinstance(target, ast.Attribute):
            self._set_attribute(self.value(target.value, space), target.attr, value)
        elif isinstance(target, ast.Subscript):
            owner = self.value(target.value, space)
            if owner.items is not None:
                _put(owner, _constant(target.slice), value)
            elif owner.may_be_tensor:
                self.note("write", "__setitem__", target, space, operands=[owner, value], result=owner, written=owner)

    def _set_attribute(self, owner: Value, name: str, value: Value) -> None:
        if owner.attributes is not None:
            owner.attributes[name] = value
        elif owner.is_known and not torch.is_tensor(owner.thing):
            live = own_attribute(owner.thing, name, UNKNOWN)
            self.fields.setdefault(id(owner.thing), {})[name] = lookup.live_instead(live, value)

    def augment(self, node: ast.AugAssign, space: Namespace) -> None:
        """Interpret ``x += y``: in place for a tensor, a new value for a number."""
        name = special_name(node.op)
        target = self.value(node.target, space)
        operand = self.value(node.value, space)
        if target.items is not None:
            target.items.extend(operand.items or [operand])
            return
        if target.is_known and isinstance(target.thing, lookup.NUMBERS):
            if operand.is_known and isinstance(operand.thing, lookup.NUMBERS):
                return
            self.bound = (ast.unparse(node.target),)
            result = self._computed(name.strip("_")[1:], [target, operand], node, space)  # type: ignore[arg-type]
            self.bound = ()
            self.assign(node.target, result, space)
            return
        if not target.may_be_tensor and not isinstance(node.target, ast.Subscript):
            return
        if isinstance(node.target, ast.Name | ast.Attribute):
            self.bound = (ast.unparse(node.target),)
        self.note("write", name, node, space, operands=[target, operand], result=target, written=target)
        self.bound = ()

    def truth(self, node: ast.expr, space: Namespace) -> bool | None:
        """Whether a condition holds, None where the analysis cannot decide."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand, space)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            parts = [self.truth(one, space) for one in node.values]
            if isinstance(node.op, ast.And):
                return False if False in parts else None if None in parts else True
            return True if True in parts else None if None in parts else False
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison(node, space)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id.startswith("has_torch_function"):
                return False
            self.value(node, space)
            return None
        value = self.value(node, space)
        is_plain = value.is_known and isinstance(value.thing, lookup.NUMBERS) and not isinstance(node, ast.Name)
        is_constant = value.is_known and isinstance(value.thing, bool | type(None))
        return bool(value.thing) if is_plain or is_constant else None

    def _comparison(self, node: ast.Compare, space: Namespace) -> bool | None:
        left, right = self.value(node.left, space), self.value(node.comparators[0], space)
        operator = node.ops[0]
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (right.is_known and right.thing is None) or not left.is_known:
                return None
            return (left.thing is None) == isinstance(operator, ast.Is)
        if isinstance(operator, ast.Eq | ast.NotEq) and isinstance(left.thing, str) and isinstance(right.thing, str):
            # Numbers may count iterations; strings mostly choose between branches.
            return (left.thing == right.thing) == isinstance(operator, ast.Eq)
        return None

    def rounds_of(self, node: ast.expr, space: Namespace) -> list[Value]:
        """The values of the variable of a loop over ``node``: a short list's live elements, else two rounds'."""
        return self.iterated(self.value(node, space))

    def iterated(self, value: Value) -> list[Value]:
        """The elements with which a loop is analysed."""
        thing = value.thing
        if isinstance(thing, nn.ModuleList | nn.Sequential | nn.ParameterList):
            return [of_thing(one) for one in list(thing)[:_ELEMENTS_READ]]
        if isinstance(thing, list | tuple) and thing and not any(isinstance(one, lookup.NUMBERS) for one in thing):
            items = [of_thing(one) for one in list(thing)[:_ELEMENTS_READ]]
            return items if len(items) > 1 else items * _ROUNDS
        if isinstance(thing, dict):
            return [Value()] * _ROUNDS
        if value.items is not None:
            items = value.items[:_ELEMENTS_READ]
            return items if len(items) > 1 else items * _ROUNDS
        return [Value(memory=value.memory)] * _ROUNDS


def _constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int) else UNKNOWN
    return UNKNOWN


def _item(owner: Value, key: Any) -> Value:
    items = owner.items or []
    if isinstance(owner.kind, list) and key in owner.kind:
        return items[owner.kind.index(key)]
    if owner.kind is None and isinstance(key, int) and -len(items) <= key < len(items):
        return items[key]
    return lookup.any_of(items)


def _put(owner: Value, key: Any, value: Value) -> None:
    assert owner.items is not None
    if isinstance(owner.kind, list):
        if key is not UNKNOWN and key in owner.kind:
            owner.items[owner.kind.index(key)] = value
            return
        owner.kind.append(key)
        owner.items.append(value)
    elif isinstance(key, int) and -len(owner.items) <= key < len(owner.items):
        owner.items[key] = value
    else:
        owner.items.append(value)


def _part(value: Value, position: int) -> Value:
    if value.items is not None and value.kind is None and position < len(value.items):
        return value.items[position]
    if value.is_known and isinstance(value.thing, list | tuple) and position < len(value.thing):
        return of_thing(value.thing[position])
    return Value(memory=value.memory) if value.memory else made()
