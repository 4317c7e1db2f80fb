"""Gradient hooks that are registered on a parameter again in every round, so that each round has one more of them.

``p.register_hook(lambda g: g * 0.5)`` in the body of a training loop halves the gradient twice in the second round.
Hooks of one code, with the same values in their closures, were registered before different backward calls, and are
all there. A hook that leaves what the one before has returned as it is (a mask, a clamp, a print) does no harm: the
last one is measured in the next backward, where it changes nothing.

Row ``hook_repeated``: role ``hook`` (where it was registered; ``name`` of the parameter; ``values``: ``shape``,
``dtype``, ``device``, ``times``, the number of these hooks).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch

from gradsan import _torch
from gradsan.graph import naming
from gradsan.model import Clue, Failure
from gradsan.record.detector import Guard
from gradsan.record.log import Core, RawStack
from gradsan.record.stacks import symbolise

ROW = "hook_repeated"
_NUMBERS = (int, float, bool, str)
_MANY, _MEASURED = 4, 8


class RepeatedHooks:
    """Measures the last of several hooks that are the same; findings go to ``found``."""

    def __init__(self, core: Core, guard: Guard, found: Callable[[Failure], None]) -> None:
        self._core, self._guard, self._found = core, guard, found
        self._restore: list[Callable[[], None]] = []
        self._measured = 0

    def forget(self) -> None:
        """Put the program's own hooks back."""
        while self._restore:
            self._restore.pop()()

    def look(self, tensor: torch.Tensor, registered: dict[int, int], stack: RawStack) -> bool:
        """Measure the hook that a leaf has got, if it has several of them; whether it is measured."""
        hooks: Any = tensor._backward_hooks
        key = next(reversed(hooks))
        hook = hooks[key]
        same = [one for one, other in hooks.items() if one in registered and _is_same(hook, other)]
        if len({registered[one] for one in same}) < _MANY or self._measured >= _MEASURED:
            return False
        self._measured += 1
        weak, times = _torch.weak_tensor(tensor), len(same)

        def before(args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            with _torch.hushed(), torch.no_grad():
                return args[0].detach().clone() if args and not _torch.is_compiling() else None

        def after(given: Any, args: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
            restore()
            if given is not None:
                taken = args[0] if result is None else result
                self._guard(lambda: self._judge(given, taken, weak(), times, stack))

        measured = self._core.listener(hook, before, after)

        def restore() -> None:
            if hooks.get(key) is measured:
                hooks[key] = hook

        hooks[key] = measured
        self._restore.append(restore)
        return True

    @_torch.hushed()
    def _judge(self, given: torch.Tensor, taken: torch.Tensor, leaf: Any, times: int, stack: RawStack) -> None:
        if leaf is None or given.layout is not torch.strided or given.shape != taken.shape:
            return
        with torch.no_grad():
            if torch.allclose(given, taken.detach(), rtol=1e-3, atol=0.0, equal_nan=True):
                return
        name = naming.name_of(leaf, sys._getframe(1))
        site = symbolise(stack)
        clue = Clue("hook", site, name=name, values={**_torch.facts_of(leaf), "times": times})
        self._found(Failure(ROW, "", "", site, (clue,), raised=False))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two hooks do the same: one code, and the same values in closure, defaults and arguments."""
    if one is other:
        return True
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, partial) and isinstance(other, partial):
        is_alike = _are_alike(one.args, other.args) and one.keywords.keys() == other.keywords.keys()
        values = one.keywords.values(), other.keywords.values()
        return is_alike and _are_alike(*map(tuple, values)) and _is_same(one.func, other.func)
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)) or one.__code__ is not other.__code__:
        return False
    return _are_alike(one.__defaults__ or (), other.__defaults__ or ()) and _are_alike(_cells(one), _cells(other))


def _cells(function: FunctionType) -> tuple[Any, ...]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(cell)
    return tuple(found)


def _are_alike(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is type(other) and isinstance(one, _NUMBERS) and one == other)
        for one, other in zip(some, others, strict=True)
    )
