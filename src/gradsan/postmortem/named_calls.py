"""Calls without source: methods of tensors and containers, functions of torch and of Python, by name."""

from __future__ import annotations

import ast
import types

import torch

from gradsan.postmortem import lookup
from gradsan.postmortem.lookup import Closure, Namespace, TensorMethod, Value, made, of_thing
from gradsan.postmortem.script import Reader
from gradsan.source.methods import ALIASING_METHODS, KEEPS_ONE, PIECES, is_inplace_name

PASSING = frozenset({"list", "tuple", "reversed", "sorted", "iter", "set", "tqdm", "trange", "next", "deepcopy"})
_EXPANDING = frozenset({"expand", "expand_as", "broadcast_to"})
_SILENT = frozenset({"item", "tolist", "numel", "size", "dim", "stride", "data_ptr", "is_contiguous", "zero_grad"})


class NamedCalls(Reader):
    """Interpreter of calls by name."""

    def _tensor_method(
        self, method: TensorMethod, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        owner, name = method.owner, method.name
        if owner.items is not None or isinstance(owner.thing, list | dict | set):
            return self._container_method(owner, name, args)
        if name == "backward":
            retain = keywords.get("retain_graph")
            kept = retain is not None and not (retain.is_known and not retain.thing)
            self.note("backward", "backward", node, space, operands=[owner], retain_graph=kept)
            return Value(None)
        if name == "step" and any(self._is_optimizer(one) for one in args):
            return self._step(next(one for one in args if self._is_optimizer(one)), [], node, space)
        if not owner.may_be_tensor:
            return Value()
        return self._builtin(name, [owner, *args], keywords, node, space)

    def _container_method(self, owner: Value, name: str, args: list[Value]) -> Value:
        if (name in KEEPS_ONE or name == "extend") and owner.items is not None and args:
            owner.items.extend(args[-1].items or args[-1:] if name == "extend" else args[-1:])
            return Value(None)
        if name in ("items", "values", "keys", "get", "pop", "popleft", "copy", "setdefault"):
            if owner.items is not None:
                values = owner.items
            else:
                inner = owner.thing.values() if isinstance(owner.thing, dict) else owner.thing
                values = [of_thing(one) for one in list(inner)[:64]]
            if name == "items":
                return Value(items=[Value(items=[Value(), one]) for one in values[:12]])
            return Value(items=values) if name in ("values", "copy") else lookup.any_of(values)
        return Value()

    def _builtin(
        self, name: str, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        """Interpret a call without source by its name."""
        if name in _SILENT:
            return Value()
        if name in ("zip", "enumerate"):
            return self._zipped(name, args)
        if name == "range":
            return Value(items=[Value(), Value()])
        if name in PASSING and args:
            return args[0]
        if name == "backward" and args:
            self.note("backward", "backward", node, space, operands=args[:1])
            return Value(None)
        if name == "detach" and args:
            return Value(memory=args[0].memory)
        out = keywords.get("out")
        operands = [*args, *keywords.values()]
        if out is not None and not (out.is_known and out.thing is None):
            self.note("write", name, node, space, operands=operands, result=out, written=out)
            return out
        if is_inplace_name(name) and args:
            self.note("write", name, node, space, operands=operands, result=args[0], written=args[0])
            return args[0]
        if name in _EXPANDING and args:
            result = Value(memory=args[0].memory | made().memory)
            self.expanded |= result.memory - args[0].memory
        elif name in ALIASING_METHODS and args:
            result = Value(memory=args[0].memory)
        elif name in PIECES and args:
            result = Value(items=[Value(memory=args[0].memory) for _ in range(_pieces(args))])
        else:
            result = made()
        if name == "clone" or any(one.may_be_tensor or one.items is not None for one in operands):
            self.note("op", name, node, space, operands=operands, result=result)
        return result

    def _of_python(self, name: str, args: list[Value]) -> Value:
        if name == "getattr" and len(args) > 1 and isinstance(args[1].thing, str):
            return lookup.attribute(args[0], args[1].thing)
        return Value()

    def _zipped(self, name: str, args: list[Value]) -> Value:
        columns = [self.iterated(one) for one in args]
        length = min(map(len, columns), default=0)
        if name == "enumerate":
            return Value(items=[Value(items=[Value(), one]) for one in columns[0]] if columns else [])
        return Value(items=[Value(items=[column[row] for column in columns]) for row in range(length)])

    def _is_optimizer(self, value: Value) -> bool:
        kind = value.kind if not value.is_known else type(value.thing)
        return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)

    def _step(self, optimizer: Value, args: list[Value], node: ast.expr, space: Namespace) -> Value:
        """Interpret a step: it writes all parameters of the optimizer, and runs its closure before and after."""
        if optimizer.is_known:
            name, written = type(optimizer.thing).__name__, Value(memory=lookup.memory_in_groups(optimizer.thing))
        else:
            name, written = optimizer.kind.__name__, (optimizer.attributes or {}).get("params", Value())
        closures = [one for one in args if isinstance(one.thing, Closure | types.FunctionType)]
        for closure in closures:
            self.called(closure, [], {}, node, space)
        self.note("step", name, node, space, operands=[], written=written)
        for closure in closures:
            self.called(closure, [], {}, node, space)
        return Value()


def _pieces(args: list[Value]) -> int:
    counts = [one.thing for one in args[1:] if one.is_known and isinstance(one.thing, int)]
    return min(max(counts[0], 1), 16) if counts else 4
