"""Containers in the abstract interpreter: displays, elements, comprehensions."""

from __future__ import annotations

import ast

from gradsan.lint.engine.attributes import Attributes
from gradsan.lint.engine.state import State
from gradsan.lint.engine.values import (
    Bag,
    Choice,
    Dictionary,
    Parameters,
    Plain,
    Sequence,
    Tensor,
    Value,
)
from gradsan.source.identifiers import chain_key


class Elements(Attributes):
    """Interpreter of containers and indices."""

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, state: State) -> Value:
        made = Sequence("tuple" if isinstance(node, ast.Tuple) else "list")
        items: list[Value] = []
        for one in node.elts:
            if isinstance(one, ast.Starred):
                value = self.evaluate(one.value, state)
                items += self.items_of(value, state)
            else:
                items.append(self.evaluate(one, state))
        state.heap[made, "@items"] = tuple(items[:60])
        return made

    def _dictionary(self, node: ast.Dict, state: State) -> Value:
        made = Dictionary()
        entries: dict[object, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            held = self.evaluate(value, state)
            if key is not None:
                entries[self._key(key, state)] = held
        state.heap[made, "@entries"] = entries
        return made

    def _key(self, node: ast.expr, state: State) -> object:
        known = self.constant(self.evaluate(node, state))
        return known if isinstance(known, str | int | float | bool) else ...

    def _element(self, node: ast.Subscript, state: State) -> Value:
        owner = self.evaluate(node.value, state)
        return self.element(owner, node, state)

    def element(self, owner: Value, node: ast.Subscript, state: State) -> Value:
        """The value of ``owner[…]``."""
        if isinstance(owner, Choice):
            owner = next((one for one in owner.values if not isinstance(one, Plain)), Plain())
        if isinstance(owner, Dictionary):
            held = state.heap.get((owner, "@entries"))
            key = self._key(node.slice, state)
            if isinstance(held, dict) and key in held:
                return held[key]  # type: ignore[no-any-return]
            values = list(held.values()) if isinstance(held, dict) else []
            if key is ... and values:
                return self._any_of(values, state)
            return self.fresh()
        if isinstance(owner, Sequence | Bag):
            items: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            if isinstance(node.slice, ast.Slice):
                return self._slice(owner, node.slice, items, state)
            index = self.constant(self.evaluate(node.slice, state))
            if isinstance(index, int) and -len(items) <= index < len(items):
                return items[index]
            return self._any_of(list(items), state) if items else self.fresh()
        if isinstance(owner, Tensor):
            index_kind = self.index_kind(node.slice, state)
            if owner.is_certain and not owner.is_array and index_kind == "view":
                made = self.view(owner, "view", node, state)
                made.text = chain_key(node) or chain_key(node.value) or ""
                return made
            if owner.is_certain and index_kind == "copy" and not owner.is_array:
                return self.apply("none", [owner], node, state, "index")
            if owner.is_certain and not owner.is_array:
                return self.copied(owner, node, state)
            key = self._key(node.slice, state)
            if key is not ... and isinstance(key, str | int):
                return self._item_of_unknown(owner, key, state)
            return self.part_of(owner, state)
        return Plain() if isinstance(owner, Plain) else self.fresh()

    def _slice(self, owner: Sequence | Bag, node: ast.Slice, items: tuple[Value, ...], state: State) -> Value:
        first = None if node.lower is None else self.constant(self.evaluate(node.lower, state))
        last = None if node.upper is None else self.constant(self.evaluate(node.upper, state))
        made: Sequence | Bag = Bag(owner.kind) if isinstance(owner, Bag) else Sequence("list")
        if isinstance(first, int | None) and isinstance(last, int | None) and node.step is None:
            state.heap[made, "@items"] = items[first:last]
        elif node.lower is None and node.upper is None:
            state.heap[made, "@items"] = items[::-1]
        else:
            state.heap[made, "@items"] = (self._any_of(list(items), state),) * 2 if items else ()
        return made

    def _item_of_unknown(self, owner: Tensor, key: object, state: State) -> Tensor:
        name = f"[{key!r}]"
        known = state.heap.get((owner, name))
        if isinstance(known, Tensor):
            return known
        made = self.part_of(owner, state)
        state.heap[owner, name] = made
        return made

    def _any_of(self, values: list[Value], state: State) -> Value:
        result = values[0]
        for one in values[1:6]:
            result = self.merge(result, one, state.way)
        return result

    def index_kind(self, node: ast.expr, state: State) -> str:
        """``view`` for slices and numbers, ``copy`` for masks and lists, ``""`` where it is not known."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        kinds = [self._part_kind(part, state) for part in parts]
        if "copy" in kinds:
            return "copy"
        return "view" if all(kind == "view" for kind in kinds) else ""

    def _part_kind(self, node: ast.expr, state: State) -> str:
        if isinstance(node, ast.Slice):
            return "view"
        if isinstance(node, ast.List | ast.Compare):
            return "copy"
        value = self.evaluate(node, state)
        if isinstance(value, Plain):
            return "view"
        if isinstance(value, Sequence):
            return "copy"
        return "copy" if isinstance(value, Tensor) and value.is_certain else ""

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, state: State) -> Value:
        made: Sequence | Dictionary = Dictionary() if isinstance(node, ast.DictComp) else Sequence("list")
        first = node.generators[0]
        over = self.evaluate(first.iter, state)
        if isinstance(node, ast.DictComp):
            element: ast.expr = node.value
        else:
            element = node.elt
        if isinstance(over, Parameters) and isinstance(element, ast.Name):
            return Parameters(over.owners)
        found: list[Value] = []
        for item in self.rounds_of(over, first.iter, state)[:6]:
            self.assign(first.target, item, state)
            for further in node.generators[1:]:
                for inner in self.rounds_of(self.evaluate(further.iter, state), further.iter, state)[:1]:
                    self.assign(further.target, inner, state)
            for test in first.ifs:
                self.evaluate(test, state)
            found.append(self.evaluate(element, state))
        if isinstance(node, ast.DictComp):
            state.heap[made, "@entries"] = {f"?{index}": one for index, one in enumerate(found)}
        else:
            state.heap[made, "@items"] = tuple(found)
        return made

    def assign(self, target: ast.expr, value: Value, state: State) -> None:
        """See :class:`Statements`."""
        raise NotImplementedError
