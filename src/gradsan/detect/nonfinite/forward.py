"""Non-finite results of operations: each call's result is searched, its operands only where that is bad."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from gradsan import _torch
from gradsan.detect.nonfinite.origins import (
    How,
    Origin,
    Origins,
    Searched,
    arguments_of,
    kind_of,
    operands_of,
    scalars_of,
)
from gradsan.graph import naming
from gradsan.model import Operand
from gradsan.record.log import Core, RawStack

_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "empty_permuted"}
)


class Forward:
    """Checks results; origins go to ``origins``, and writes into leaves to ``on_leaf_write``."""

    def __init__(self, core: Core, origins: Origins, on_leaf_write: Any) -> None:
        """Call ``on_leaf_write(tensor, origin)`` where a call has made a leaf non-finite."""
        self._core, self._origins, self._on_leaf_write = core, origins, on_leaf_write
        self._names: dict[tuple[Any, str], str | None] = {}
        self.inside: Callable[[Any, Any], Origin | None] | None = None
        """Returns the origin of a call's result inside a compiled graph; None if unknown."""

    def is_harmless(self, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a result is known to be finite, or to show checked memory, at next to no cost."""
        if not isinstance(result, torch.Tensor):
            return False
        first: Any = args[0] if args else None
        if first is result:
            # Where bad memory is known, a write may have made it finite.
            return not self._origins and _torch.is_seen_finite(result)
        return _torch.is_view_of(result, first) or _torch.is_seen_finite(result)

    def on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Check the result of one call; as ``on_result`` of the core."""
        if op == "__call__":
            op, args = _torch.operator_called(args)
        if isinstance(result, torch.Tensor):
            # A view shows checked memory, and makes no value.
            in_place = bool(args) and result is args[0]
            if in_place or not _shows_operand(result, args, kwargs):
                self._look(op, args, kwargs, result, in_place)
        elif result is None:
            if args and isinstance(args[0], torch.Tensor):
                self._look(op, args, kwargs, args[0], True)
        else:
            for one in _torch.tensors_in(result, 1):
                if not _shows_operand(one, args, kwargs):
                    self._look(op, args, kwargs, one, False)

    def _look(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, in_place: bool) -> None:
        if not _torch.is_nonfinite(result):
            if in_place and self._origins:
                self._origins.forget(result)
            return
        # ``broadcast_tensors`` returns tensors that have the shape already unchanged.
        if not in_place and any(one is result for _, one in arguments_of(args, kwargs)):
            return
        is_compiled = op == "apply" and result.grad_fn is not None and _torch.is_compiled_node(result.grad_fn)
        origin = self.inside(result, self.stack_here()) if is_compiled and self.inside is not None else None
        if origin is None:
            op = "CompiledFunction" if is_compiled else op
            origin = self._origins.keep(result, self._origin(op, args, kwargs, result, in_place))
        else:
            self._origins.link(result, origin)
        if in_place:
            self._on_leaf_write(result, origin)

    def stack_here(self) -> Any:
        """Return the place of the current call: a raw stack, or a Site."""
        return self._core.stack(0)

    def _origin(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, in_place: bool) -> Origin:
        stack = self.stack_here()
        facts = Searched(result)
        operands = [(name, one) for name, one in arguments_of(args, kwargs) if one is not result]
        bad = [(name, one) for name, one in operands if _torch.is_nonfinite(one)]
        parents = [self._origins.of(one) or self._given(name, one, stack, op) for name, one in bad]
        before = self._origins.of(result) if in_place else None
        if before is not None:
            parents.append(before)
        numbers = [(name, number) for name, number in scalars_of(args, kwargs) if kind_of(number) is not None]
        how: How
        if parents:
            is_new = facts.has_nan and all(parent.value != "nan" for parent in parents)
            how = (
                "nan_of_inf"
                if is_new and not any(bool(torch.isnan(one.detach()).any()) for _, one in bad)
                else "passed"
            )
        elif op in _UNWRITTEN:
            how = "memory"
        elif op == "set_":
            # Memory filled from outside: a worker of a DataLoader, a file.
            how = "given"
        elif not (operands or in_place):
            # Neither NaN in the program's own data (``torch.tensor(rows)``) nor a single inf among many numbers is
            # intended; -inf may be a mask.
            how = "given" if facts.has_nan or (facts.has_inf and facts.elements < facts.of) else "constant"
        elif numbers:
            how = "given" if any(kind_of(number) == "nan" for _, number in numbers) else "constant"
        else:
            how = "made"
        return Origin(
            how,
            op,
            stack,
            facts.value,
            parents=tuple(parents),
            facts=facts,
            operands=tuple(self._named(stack, operands, facts)) if how in ("made", "nan_of_inf") else (),
            name=next(iter(self._names_at(stack, bad or operands).values()), None),
            scalars=tuple((name, repr(number)) for name, number in scalars_of(args, kwargs)),
            in_backward=bool(self._core.running),
            has_graph=bool(result.requires_grad),
        )

    def _named(self, stack: RawStack, operands: list[tuple[str, Any]], facts: Searched) -> Iterator[Operand]:
        names = self._names_at(stack, operands)
        for one in operands_of(operands, facts.index, facts.shape):
            yield replace(one, name=names.get(one.argument))

    def _names_at(self, stack: RawStack, operands: list[tuple[str, Any]]) -> dict[str, str]:
        """Return the program's names of the operands, by argument; each is searched once a line."""
        frame = sys._getframe()
        for at, one in operands:
            if (stack, at) not in self._names:
                self._names[stack, at] = naming.name_of(one, frame) if one.is_floating_point() else None
        known = ((at, self._names[stack, at]) for at, _ in operands)
        return {at: name for at, name in known if name is not None}

    def _given(self, argument: str, tensor: torch.Tensor, stack: RawStack, op: str) -> Origin:
        facts = Searched(tensor)
        return self._origins.keep(
            tensor,
            Origin(
                # Data have no Node: a tensor with one was made by an operation.
                "given" if tensor.grad_fn is None else "untraced",
                op,
                stack,
                facts.value,
                facts=facts,
                name=self._names_at(stack, [(argument, tensor)]).get(argument),
                scalars=(("argument", argument),),
            ),
        )


def _shows_operand(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a result is a view of an operand; ``linear`` of three dimensions returns a view of its own result."""
    if not result._is_view():
        return False
    storage = _torch.storage_or_none(result)
    return any(_torch.storage_or_none(one) == storage for _, one in arguments_of(args, kwargs))
