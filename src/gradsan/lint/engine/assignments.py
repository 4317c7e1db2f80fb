"""Assignments in the abstract interpreter, and writes by operators and indices."""

from __future__ import annotations

import ast

from gradsan.lint.engine.expressions import Expressions
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import operation
from gradsan.lint.engine.values import (
    NO,
    YES,
    Bag,
    Choice,
    Dictionary,
    Layer,
    Object,
    Optimizer,
    Parameters,
    Plain,
    Sequence,
    Tensor,
    Value,
    words,
)
from gradsan.source.identifiers import chain_key
from gradsan.source.methods import METHODS

_SPELLED = "requires_grad"
_SURELY_MISSPELT = words(
    """
    require_grad requires_grads require_grads requires_gard requires_gradient requires_grade requres_grad
    reqiures_grad requries_grad requirs_grad requiers_grad required_grad requires_grda
    """
)


class Assignments(Expressions):
    """Interpreter of assignments and writes."""

    def _assign_statement(self, node: ast.Assign, state: State) -> State:
        value = self.evaluate(node.value, state)
        self._name_value(node, value)
        added = node.value
        if isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add) and self._loops:
            target = node.targets[0]
            if isinstance(target, ast.Name | ast.Attribute) and chain_key(added.left) == chain_key(target):
                term = self.evaluate(added.right, state) if isinstance(added.right, ast.Name) else value
                self.added(node, target, added.right, value, term, state)
        for target in node.targets:
            self.assign(target, value, state)
        return state

    def _annotated(self, node: ast.AnnAssign, state: State) -> State:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, state), state)
        return state

    def _name_value(self, node: ast.Assign, value: Value) -> None:
        if isinstance(value, Tensor) and not value.text and isinstance(node.targets[0], ast.Name | ast.Attribute):
            value.text = chain_key(node.targets[0]) or ""

    def assign(self, target: ast.expr, value: Value, state: State) -> None:
        """Assign ``value`` to ``target``."""
        if isinstance(target, ast.Name):
            frame = self.frames[-1]
            state.names[frame.outer_names.get(target.id, frame.number), target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value, state)
        elif isinstance(target, ast.Attribute):
            self._set(target, value, state)
        elif isinstance(target, ast.Subscript):
            self._set_item(target, value, state)

    def _unpack(self, target: ast.Tuple | ast.List, value: Value, state: State) -> None:
        items = self.items_of(value, state) if isinstance(value, Sequence | Bag) else []
        # What an unknown operation gives, ``broadcast_tensors`` for one, need not be views of one tensor.
        is_known = isinstance(value, Tensor) and (value.node is None or operation(value.node.op) is not None)
        if isinstance(value, Tensor) and value.is_certain and not value.is_array and is_known:
            items = self.items_of(self.pieces(value, target, state), state)
        for index, element in enumerate(target.elts):
            inner = element.value if isinstance(element, ast.Starred) else element
            if isinstance(element, ast.Starred):
                item: Value = self.fresh()
            elif index < len(items):
                item = items[index]
            elif isinstance(value, Tensor):
                item = self.part_of(value, state)
            elif isinstance(value, Plain):
                item = Plain()
            else:
                item = self.fresh()
            if isinstance(item, Tensor) and item.view == "pieces" and isinstance(inner, ast.Name):
                item = self.view(item, "pieces", element, state)
            if isinstance(item, Tensor) and not item.text and isinstance(inner, ast.Name):
                item.text = inner.id
            self.assign(inner, item, state)

    def _set(self, target: ast.Attribute, value: Value, state: State) -> None:
        owner = self.evaluate(target.value, state)
        name = target.attr
        flag = self.constant(value)
        if name in _SURELY_MISSPELT:
            self._misspelt(owner, target, state)
        if isinstance(owner, Choice):
            if name == _SPELLED and any(isinstance(one, Tensor) for one in owner.values):
                return
            owner = next((one for one in owner.values if not isinstance(one, Plain)), owner)
        if name == _SPELLED:
            if isinstance(owner, Tensor) and (owner.is_certain or owner.owners):
                self.set_requires_grad(owner, flag, target, state)
            elif isinstance(owner, Layer | Bag) or (isinstance(owner, Object) and owner.kind.is_module):
                site = self.site(target)
                values: dict[str, object] = {"name": ast.unparse(target.value)}
                if isinstance(getattr(self.statement, "value", None), ast.Constant) and flag in (True, False):
                    self.report(
                        "GS704",
                        "flag_on_module",
                        site,
                        state,
                        YES,
                        values,
                        [("written", site)],
                        fix="call_requires_grad",
                    )
            elif isinstance(owner, Tensor):
                state.heap[owner, "@trains"] = NO if flag is False else 1
                state.heap[owner, "@grad"] = 1
            return
        if isinstance(owner, Tensor) and name == "data":
            return
        if isinstance(owner, Tensor) and name == "grad":
            state.heap.pop((owner, "@grad value"), None)
            return
        if isinstance(owner, Object | Bag) or (isinstance(owner, Tensor) and not owner.is_certain):
            self._may_lose(owner, value, target, state)
        if name == "inplace" and isinstance(owner, Layer) and flag is True:
            owner.inplace = True
            return
        self.set_attribute(owner, name, value, state)

    def _misspelt(self, owner: Value, target: ast.Attribute, state: State) -> None:
        known = isinstance(owner, Layer | Parameters) or (
            isinstance(owner, Tensor) and bool(owner.owners or owner.is_certain)
        )
        own = isinstance(target.value, ast.Name) and target.value.id == "self"
        if own:
            return
        site = self.site(target)
        values: dict[str, object] = {"name": target.attr, "owner": ast.unparse(target.value)}
        level = YES if known or target.attr in _SURELY_MISSPELT else 1
        self.report("GS703", "attribute_misspelt", site, state, level, values, [("written", site)], fix="spell")

    def _may_lose(self, owner: Value, value: Value, target: ast.AST, state: State) -> None:
        """Report a module that replaces one held by an optimizer."""
        if not (isinstance(value, Layer) and value.has_weights):
            return
        for optimizer in {one for one in state.names.values() if isinstance(one, Optimizer)}:
            given = state.heap.get((optimizer, "@given"))
            if isinstance(given, tuple) and owner in given:
                text = ast.unparse(target) if isinstance(target, ast.expr) else "?"
                state.heap[optimizer, "@lost"] = (self.site(target), text)

    def _set_item(self, target: ast.Subscript, value: Value, state: State) -> None:
        owner = self.evaluate(target.value, state)
        if isinstance(owner, Choice):
            owner = next((one for one in owner.values if not isinstance(one, Plain)), owner)
        if isinstance(owner, Dictionary):
            held = state.heap.get((owner, "@entries"))
            entries = dict(held) if isinstance(held, dict) else {}
            entries[self._key(target.slice, state)] = value
            state.heap[owner, "@entries"] = entries
        elif isinstance(owner, Sequence | Bag):
            items: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            index = self.constant(self.evaluate(target.slice, state))
            if isinstance(index, int) and -len(items) <= index < len(items):
                self._may_lose(owner, value, target, state)
                changed = list(items)
                changed[index] = value
                state.heap[owner, "@items"] = tuple(changed)
            elif items and index is ...:
                state.heap[owner, "@items"] = tuple(self.merge(one, value, state.branches) for one in items)
            else:
                state.heap[owner, "@items"] = (*items, value)[-60:]
        elif isinstance(owner, Tensor):
            if owner.is_certain:
                kind = "array" if owner.is_array else "setitem"
                self._write_part(owner, "setitem_", [value], target, state, kind)
            else:
                known = self._key(target.slice, state)
                if known is not ...:
                    state.heap[owner, f"[{known!r}]"] = value

    def _write_part(
        self, owner: Tensor, name: str, operands: list[Value], target: ast.Subscript, state: State, kind: str
    ) -> None:
        if self.is_leaf(owner, state) and state.grad:
            site = self.site(target)
            values: dict[str, object] = {"name": ast.unparse(target), "op": "[...] ="}
            self.report("GS301", "leaf_written", site, state, YES, values, [("written", site)], fix="no_grad")
            return
        self.write(owner, name, operands, target, state, kind)

    def _augment(self, node: ast.AugAssign, state: State) -> State:
        if isinstance(node.target, ast.Subscript):
            return self._augment_item(node, node.target, state)
        reading = _as_read(node.target)
        old = self.evaluate(reading, state)
        value = self.evaluate(node.value, state)
        if isinstance(old, Choice):
            kept = [one for one in old.values if not is_none_value(one)]
            old = kept[0] if len(kept) == 1 else self.fresh()
        if isinstance(old, Sequence):
            items = (*self.items_of(old, state), *self.items_of(value, state))
            state.heap[old, "@items"] = items[-60:]
        elif isinstance(old, Tensor) and old.is_certain and not (old.is_array and not old.memories):
            name = f"{METHODS[type(node.op)]}_"
            self.write(old, name, [value], node, state, "array" if old.is_array else "inplace")
            self.added(node, node.target, node.value, old, value, state)
        else:
            made = self.compute(node.op, old, value, node, state)
            if isinstance(made, Tensor) and isinstance(old, Tensor):
                made.is_certain = False
            if isinstance(made, Tensor):
                made.text = chain_key(node.target) or ""
            self.assign(node.target, made, state)
            self.added(node, node.target, node.value, made, value, state)
        return state

    def added(self, node: ast.stmt, target: ast.expr, term: ast.expr, total: Value, value: Value, state: State) -> None:
        """Interpret ``total += value``. See :class:`Sums`."""

    def _augment_item(self, node: ast.AugAssign, target: ast.Subscript, state: State) -> State:
        owner = self.evaluate(target.value, state)
        value = self.evaluate(node.value, state)
        if isinstance(owner, Tensor) and owner.is_certain:
            name = f"{METHODS[type(node.op)]}_"
            kind = "array" if owner.is_array else "setitem"
            self._write_part(owner, name, [value], target, state, kind)
            return state
        held = self.element(owner, _as_read(target), state)  # type: ignore[arg-type]
        made = self.compute(node.op, held, value, node, state)
        if isinstance(made, Tensor):
            made.is_certain = False
        self._set_item(target, made, state)
        return state


def is_none_value(value: Value) -> bool:
    """Whether a value is surely None."""
    return isinstance(value, Plain) and value.known and value.value is None


def _as_read(target: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    return target
