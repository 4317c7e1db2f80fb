"""Optimizers and their groups, schedulers, and parameters registered late, as the program makes them.

The watched public methods of torch are not called by steps: ``Optimizer.add_param_group``, the constructors of
schedulers, and the registration of parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradsan import _torch
from gradsan.graph import naming
from gradsan.record.detector import Detector, Run
from gradsan.record.guarding import numbered_apart
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches, standing

_LATE_KEPT, _PLACES_KEPT, _TIMES = 4_096, 64, 3


def is_in_forward(stack: RawStack) -> bool:
    """Whether a module's call is on the stack."""
    return any(_torch.is_module_call(code.co_filename) and code.co_name == "_call_impl" for code in stack.codes)


class Made(NamedTuple):
    """An optimizer, a scheduler or a late parameter: a weak reference, and the clock and stack of its construction.

    ``sequence`` is the number that the next Node would have got then; optimizers only.
    """

    weak: Any
    clock: int
    stack: RawStack
    sequence: int = -1


class Making(Detector):
    """Notes optimizers and schedulers; ``on_group`` is called with an optimizer that gets parameters."""

    part = "optimizers"

    def __init__(self, run: Run) -> None:
        self._core = run.core
        self._began = 0
        self._optimizers: dict[int, Made] = {}
        self._schedulers: dict[int, Made] = {}
        self._late: dict[int, Made] = {}
        self._in_calls: dict[Any, list[tuple[Any, str, Any]]] = {}
        self.run_out: Made | None = None
        """The last optimizer that was given a group by an exhausted generator."""
        self.on_group: list[Callable[[Any, RawStack], None]] = []

    def forget(self) -> None:
        self._began, self.run_out = self._core.clock, None

    def optimizers(self) -> list[tuple[Any, Made]]:
        """Return the live optimizers."""
        return [(one, made) for made in list(self._optimizers.values()) if (one := made.weak()) is not None]

    def has_optimizer(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether an optimizer has been made since watching began, or an older one has some of ``parameters``."""
        if any(made.clock >= self._began for made in self._optimizers.values()):
            return True
        own = {id(one) for one in parameters}
        return bool(own) and any(id(one) in own for one in _torch.parameters_of(*naming.optimizers_alive()))

    def schedulers(self) -> list[tuple[Any, Made]]:
        """Return the live schedulers."""
        return [(one, made) for made in list(self._schedulers.values()) if (one := made.weak()) is not None]

    def remade(self, parameter: torch.Tensor) -> tuple[str, Any] | None:
        """Return name and stack of a parameter that a forward has made, if the ones that it made before are gone."""
        for *before, (weak, name, stack) in self._in_calls.values():
            if weak() is parameter and len(before) == _TIMES - 1 and all(one[0]() is None for one in before):
                return name, stack
        return None

    def is_late(self, parameter: torch.Tensor, clock: int) -> bool:
        """Whether a module got the parameter after ``clock``, when some optimizer existed."""
        made = self.late(parameter)
        return made is not None and made.clock > clock

    def late(self, parameter: torch.Tensor) -> Made | None:
        """Return where a module got the parameter when some optimizer existed."""
        made = self._late.get(id(parameter))
        return made if made is not None and made.weak() is parameter else None

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        self._watch(patches, guard, Optimizer, "add_param_group", self._grouped, partial(self._given, guard))
        self._watch(patches, guard, LRScheduler, "__init__", self._scheduled)
        if "__init__" in vars(ReduceLROnPlateau):
            self._watch(patches, guard, ReduceLROnPlateau, "__init__", self._scheduled)

        def registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
            if self._optimizers and parameter is not None:
                stack = self._core.stack(1)
                guard(lambda: self._registered(module, name, parameter, stack))

        handle = numbered_apart(register_module_parameter_registration_hook(registered))
        patches.on_undo(handle.remove)

    def _watch(
        self,
        patches: Patches,
        guard: Callable[[Callable[[], object]], None],
        owner: Any,
        name: str,
        note: Callable[[Any, Any], None],
        before: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
    ) -> None:
        original, core = standing(owner, name), self._core

        def called(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            stack = core.stack(1)
            guard(lambda: note(args[0], stack))

        patches.set(owner, name, core.listener(original, before, called))

    def _given(
        self, guard: Callable[[Callable[[], object]], None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        stack = self._core.stack(1)
        guard(lambda: self._note_run_out(args, kwargs, stack))
        return True

    def _note_run_out(self, args: tuple[Any, ...], kwargs: dict[str, Any], stack: RawStack) -> None:
        group = args[1] if len(args) > 1 else kwargs.get("param_group")
        given = group.get("params") if isinstance(group, dict) else None
        if _torch.is_empty_generator(given, None):
            self.run_out = Made(weakref.ref(args[0]), self._core.clock, stack)

    def _grouped(self, optimizer: Optimizer, stack: RawStack) -> None:
        if id(optimizer) not in self._optimizers or self._optimizers[id(optimizer)].weak() is not optimizer:
            self._prune(self._optimizers)
            self._optimizers[id(optimizer)] = Made(
                weakref.ref(optimizer), self._core.tick(), stack, _torch.sequence_number()
            )
        for listening in self.on_group:
            listening(optimizer, stack)

    def _scheduled(self, scheduler: Any, stack: RawStack) -> None:
        self._prune(self._schedulers)
        self._schedulers[id(scheduler)] = Made(weakref.ref(scheduler), self._core.clock, stack)

    def _registered(self, module: nn.Module, name: str, parameter: torch.Tensor, stack: RawStack) -> None:
        if is_in_forward(stack):
            place = (*stack.codes, name)
            if place in self._in_calls or len(self._in_calls) < _PLACES_KEPT:
                made = _torch.weak_tensor(parameter), f"{type(module).__name__}.{name}", stack
                self._in_calls[place] = [*self._in_calls.get(place, [])[1 - _TIMES :], made]
        if len(self._late) >= _LATE_KEPT:
            self._prune(self._late)
        if len(self._late) < _LATE_KEPT:
            self._late[id(parameter)] = Made(_torch.weak_tensor(parameter), self._core.tick(), stack)

    @staticmethod
    def _prune(table: dict[int, Made]) -> None:
        for key in [key for key, made in table.items() if made.weak() is None]:
            del table[key]
