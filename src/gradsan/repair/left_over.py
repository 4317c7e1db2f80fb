"""What an optimizer's parameters are left with at the end, where the run does not show what becomes of it.

A backward after the only step of an optimizer leaves gradients that nobody has stepped with. Whether the next round
clears them first, a run of one round tells only if it has done so itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(slots=True)
class _Stepped:
    key: str
    parameters: tuple[weakref.ref[Any], ...]
    began_cleared: bool
    steps: int = 0


class LeftOver:
    """Listens to ``zero_grad()`` and is told of steps."""

    def __init__(self) -> None:
        """Nothing has been cleared or stepped yet."""
        self._cleared: Any = WeakIdKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Any, _Stepped] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Begin to listen; of classes that bring a ``zero_grad`` of their own nothing is heard."""
        for kind, parameters in ((torch.optim.Optimizer, _stepped_with), (torch.nn.Module, torch.nn.Module.parameters)):
            kind.zero_grad = self._noting(kind.zero_grad, parameters)  # type: ignore[method-assign]

    def step(self, optimizer: Any, key: str) -> None:
        """A step of ``optimizer``, before or after it."""
        if optimizer not in self._stepped:
            parameters = list(_stepped_with(optimizer))
            was_cleared = any(one in self._cleared for one in parameters)
            self._stepped[optimizer] = _Stepped(key, tuple(map(weakref.ref, parameters)), was_cleared)
        self._stepped[optimizer].steps += 1

    def undecided(self) -> list[tuple[str, list[Any]]]:
        """Key and gradients of optimizers that made one step, and were not seen to be cleared before."""
        found: list[tuple[str, list[Any]]] = []
        for one in self._stepped.values():
            parameters = [parameter for reference in one.parameters if (parameter := reference()) is not None]
            if one.steps == 1 and not one.began_cleared and len(parameters) == len(one.parameters):
                found.append((one.key, [parameter.grad for parameter in parameters]))
        return found

    def _noting(self, zero: Callable[..., None], parameters: Callable[[Any], Iterable[Any]]) -> Callable[..., None]:
        @functools.wraps(zero)
        def noting(owner: Any, *args: Any, **kwargs: Any) -> None:
            for one in parameters(owner):
                self._cleared[one] = True
            zero(owner, *args, **kwargs)

        return noting


def _stepped_with(optimizer: Any) -> Iterable[Any]:
    return (one for group in optimizer.param_groups for one in group["params"])
