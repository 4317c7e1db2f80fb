"""Parameters that become non-finite: by a step of an optimizer, or by a statement that writes into a leaf."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsan import _torch
from gradsan.detect.nonfinite.origins import Origin, Origins, Searched, operands_of
from gradsan.record.guarding import numbered_apart, own
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches


class Consumed(Protocol):
    """Callback for parameters that become non-finite."""

    def __call__(
        self,
        parameters: list[torch.Tensor],
        origins: list[Origin],
        stack: RawStack,
        op: str,
        number: int,
        is_by_hand: bool = False,
    ) -> None:
        """Report ``parameters`` with ``origins`` of their values, written by ``op`` at ``stack`` in round ``number``.

        ``is_by_hand``: a statement of the program wrote, and no optimizer.
        """


class Updates:
    """Counts the steps of each optimizer, and checks the parameters after each."""

    def __init__(
        self, core: Core, origins: Origins, on_consumed: Consumed, on_harmless_step: Callable[[int], None]
    ) -> None:
        """Call ``on_consumed`` once per parameter that becomes non-finite.

        ``on_harmless_step`` is called with the round of each other step.
        """
        self._core, self._origins, self._on_consumed = core, origins, on_consumed
        self._on_harmless_step = on_harmless_step
        self._rounds: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._spoilt = _torch.WeakTensors()
        self.steps = 0

    def install(self, patches: Patches, run: Callable[[Callable[[], None]], None]) -> None:
        """Check parameters after every step from now on, under ``run``."""

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if all(_torch.is_seen_finite(one) for one in _parameters(optimizer)):
                self._on_harmless_step(self._count(optimizer))
                return
            stack = self._core.stack(0)
            run(lambda: self._stepped(optimizer, stack))

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            # Parameters that were not finite before the first step are not this step's fault.
            if optimizer not in self._rounds:
                run(lambda: self._note_before(optimizer))

        patches.on_undo(numbered_apart(register_optimizer_step_pre_hook(_torch.untraced(own(before)))).remove)
        patches.on_undo(numbered_apart(register_optimizer_step_post_hook(_torch.untraced(own(after)))).remove)

    def forget(self) -> None:
        self._rounds.clear()
        self._spoilt.clear()
        self.steps = 0

    def _note_before(self, optimizer: Optimizer) -> None:
        self._rounds[optimizer] = [0]
        for parameter in _parameters(optimizer):
            if _torch.is_nonfinite(parameter):
                self._spoil(parameter)

    def _stepped(self, optimizer: Optimizer, stack: RawStack) -> None:
        number = self._count(optimizer)
        fresh = [one for one in _parameters(optimizer) if not self._is_spoilt(one) and _torch.is_nonfinite(one)]
        if not fresh:
            self._on_harmless_step(number)
            return
        for parameter in fresh:
            self._spoil(parameter)
        name = f"{type(optimizer).__name__}.step"
        bad = [one for one in fresh if one.grad is not None and _torch.is_nonfinite(one.grad)]
        found = [origin for one in bad if (origin := self._origins.of(one.grad)) is not None]
        if bad:
            self._on_consumed(fresh, found, stack, name, number)
        else:
            self._on_consumed(fresh, [self._update(optimizer, fresh[0], stack, name)], stack, name, number)

    def _count(self, optimizer: Optimizer) -> int:
        count = self._rounds.setdefault(optimizer, [0])
        count[0] += 1
        self.steps += 1
        return count[0] - 1

    def _update(self, optimizer: Optimizer, parameter: torch.Tensor, stack: RawStack, name: str) -> Origin:
        facts = Searched(parameter)
        gradient = [] if parameter.grad is None else [("grad", parameter.grad)]
        groups = [group for group in optimizer.param_groups if any(one is parameter for one in group["params"])]
        settings = {key: value for group in groups for key, value in group.items() if key in ("lr", "eps", "betas")}
        return self._origins.keep(
            parameter,
            Origin(
                "update",
                name,
                stack,
                facts.value,
                facts=facts,
                operands=operands_of(gradient, facts.index, facts.shape),
                scalars=tuple((key, str(value)) for key, value in settings.items()),
            ),
        )

    def written(self, tensor: torch.Tensor, origin: Origin, leaves: _torch.WeakTensors, number: int) -> None:
        """Handle a statement that made ``tensor`` non-finite: it may be the memory of one of ``leaves``."""
        storage = _torch.storage_or_none(tensor)
        leaf = next((one for one in list(leaves.values()) if _torch.storage_or_none(one) == storage), None)
        if leaf is None or self._is_spoilt(leaf):
            return
        self._spoil(leaf)
        self._on_consumed([leaf], [origin], origin.stack, origin.op, number, is_by_hand=True)

    def _spoil(self, parameter: torch.Tensor) -> None:
        self._spoilt.set(id(parameter), parameter)

    def _is_spoilt(self, parameter: torch.Tensor) -> bool:
        # By identity: tensors compare by their elements.
        return self._spoilt.get(id(parameter)) is parameter


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [one for one in _torch.parameters_of(optimizer) if _torch.is_tensor(one)]
