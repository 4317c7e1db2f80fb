"""Search for the origin of NaN and Inf, a mode of watching: turns the origins found by its parts into findings."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from gradsan import _torch
from gradsan.detect.nonfinite.backward import Backward
from gradsan.detect.nonfinite.compiled import CompiledCalls
from gradsan.detect.nonfinite.forward import Forward
from gradsan.detect.nonfinite.origins import Origin, Origins, Searched, first_cause
from gradsan.detect.nonfinite.updates import Updates
from gradsan.graph import naming
from gradsan.graph.naming import optimizers_alive
from gradsan.model import Birth, Born, Message, NonFinite, NonFiniteSeen
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward
from gradsan.record.user_hooks import TensorHooks

_MOST = 100
_VALUES = re.compile(r"\b(nan|inf|finite|infinite|infinity)\b", re.IGNORECASE)
_LOSSES_KEPT = 8
_NAMED = 8
_CASTS = ("to", "half", "bfloat16", "float", "type")
"""Methods that may make infinities of finite numbers, and are not logged: they save no tensor."""


class NonFiniteSearch:
    """Searches while a stretch of watching demands it; findings go to ``report``."""

    def __init__(self, core: Core, report: Callable[[NonFinite], None], note: Callable[[Message], None]) -> None:
        """Report by ``report``; ``note`` takes blind spots."""
        self._core, self._put, self._note = core, report, note
        self._found = 0
        self._busy = threading.local()
        self._origins = Origins()
        self._leaves = _torch.WeakTensors()
        self._forward = Forward(core, self._origins, self._on_write)
        cut = partial(note, Message("blind.nonfinite_long_graph"))
        self._backward = Backward(core, self._origins, self._busy, cut)
        self._compiled = CompiledCalls(core, self._origins)
        self._forward.inside, self._backward.inside = self._compiled.in_forward, self._compiled.in_backward
        self._updates = Updates(core, self._origins, self._on_consumed, self._on_harmless_step)
        self._noticed: Any = None
        self._bad_losses: dict[int, Origin] = {}
        self._described: set[int] = set()
        self._pending: tuple[list[Any], Origin, Any, int] | None = None
        self._pending_loss: tuple[Origin, int] | None = None
        self._harmless_loss: tuple[Origin, int] | None = None
        self._rounds = 0
        self._has_consumer = self._has_failed = False
        self._losses: list[float] = []

    def start(self, patches: Patches, run: Callable[[Callable[[], None]], None]) -> None:
        """Check everything from now on, until ``patches`` are undone."""
        self._origins.clear()
        self._updates.forget()
        self._found = 0
        self._losses.clear()
        self._described.clear()
        self._bad_losses.clear()
        self._pending, self._pending_loss, self._harmless_loss, self._noticed = None, None, None, None
        self._rounds, self._has_consumer, self._has_failed = 0, False, False

        def quietly(work: Callable[[], None]) -> None:
            if not getattr(self._busy, "on", False):
                self._busy.on = True
                try:
                    with _torch.hushed(), torch.no_grad():
                        run(work)
                finally:
                    self._busy.on = False

        def on_result(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            # Nearly every call ends here.
            may_hold = result is None or isinstance(result, (torch.Tensor, tuple, list))
            if not may_hold or getattr(self._busy, "on", False) or _torch.is_transformed():
                return
            if op == "apply":
                self._compiled.note(args, result)
            if not (self._forward.is_harmless(args, result) or _torch.is_compiling()):
                quietly(lambda: self._forward.on_result(op, args, kwargs, result))

        def on_cast(name: str, _: object, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if args and result is not args[0]:
                on_result(name, args, kwargs, result)

        self._quietly = quietly
        self._core.on_result = on_result
        for name in _CASTS:
            cast = standing(torch.Tensor, name)
            patches.set(torch.Tensor, name, self._core.listener(cast, None, partial(on_cast, name)))
        self._backward.install(quietly)
        self._updates.install(patches, quietly)
        TensorHooks(self._core).install(patches)
        patches.on_undo(self._stop)

    def _stop(self) -> None:
        self._core.on_result = None
        self._backward.stop()

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the loss, and register the checks of gradients; as ``listeners.BeforeBackward``."""
        clock, stack, outputs = entry.clock, entry.stack, entry.outputs
        if _torch.is_transformed():
            self._note(Message("blind.nonfinite_transformed"))
        elif _torch.is_compiled_autograd():
            self._note(Message("blind.nonfinite_compiled_backward"))
        # A backward traced by a compiler computes nothing, and gradsan's calls might be traced, too.
        elif not _torch.has_modes() and all(_torch.is_seen_finite(one) for one in outputs):
            # Nearly every backward begins here: no mode or class of the program's would notice these calls.
            self._begin(clock, stack, outputs, ())
        elif all(_torch.has_values(one) for one in outputs if _torch.is_tensor(one)):
            given = [one for one in outputs if _torch.is_tensor(one)]
            self._quietly(lambda: self._begin(clock, stack, outputs, list(filter(_torch.is_nonfinite, given))))

    def after_backward(self, entry: RawBackward) -> None:
        """Collect the gradients that a backward has left in ``.grad``; as ``listeners.AfterBackward``."""
        if not self._backward.has(entry.clock):
            return
        self._compiled.forget()
        if self._bad_losses or self._backward.given(entry.clock):
            self._quietly(lambda: self._end(entry.clock, entry.stack))
        else:
            # Nearly every backward ends here, without calls into torch.
            self._backward.end(entry.clock)
            self._rounds += 1
            self._pending_loss = None

    def failed(self, entry: RawBackward, error: BaseException) -> None:
        """Report the origin where a backward failed because of a NaN; anomaly mode does that."""
        origins = self._backward.given(entry.clock) if _VALUES.search(str(error)) is not None else []
        if origins and not self._found:
            first = min(origins, key=lambda one: one.number)
            self._report(first_cause(first), [], None, None, self._rounds, "stopped")
        self._backward.end(entry.clock)
        self._bad_losses.pop(entry.clock, None)

    def _begin(self, clock: int, stack: RawStack, outputs: Any, bad: Sequence[Any]) -> None:
        noticed_before, self._noticed = self._noticed, stack
        losses = [one for one in outputs if _torch.is_tensor(one)]
        roots = tuple(one.grad_fn for one in losses if one.grad_fn is not None)
        # A class that dispatches would notice the read of its number.
        is_one = len(losses) == 1 and _torch.has_elements(losses[0]) and losses[0].numel() == 1
        if is_one and not bad and not losses[0].is_complex():
            self._losses = [*self._losses[-_LOSSES_KEPT + 1 :], float(_torch.number(losses[0]))]
        self._backward.begin(clock, roots)
        for leaf in self._backward.leaves(clock):
            # By identity: the memory of a leaf is only read where something bad is written.
            if self._leaves.get(id(leaf)) is not leaf:
                self._leaves.set(id(leaf), leaf)
        if bad:
            self._bad_losses[clock] = self._origin_of_loss(bad[0], stack)
            self._look_at_leaves(self._backward.leaves(clock), noticed_before)

    def _look_at_leaves(self, leaves: list[torch.Tensor], noticed: Any) -> None:
        """Check leaves remade from results of a round: ``p = (p - rate * grad).detach().requires_grad_()``."""
        spoilt = [
            (leaf, origin)
            for leaf in leaves
            if _torch.is_nonfinite(leaf)
            and (origin := self._origins.of(leaf)) is not None
            and first_cause(origin)[0].how not in ("given", "constant")
        ]
        if spoilt and not self._updates.steps:
            now, self._noticed = self._noticed, noticed
            first = min((origin for _, origin in spoilt), key=lambda one: one.number)
            number = max(self._rounds - 1, 0)
            self._on_consumed([leaf for leaf, _ in spoilt], [first], first.stack, first.op, number, is_by_hand=True)
            self._noticed = now

    def _origin_of_loss(self, loss: torch.Tensor, stack: RawStack) -> Origin:
        known = self._origins.of(loss)
        if known is not None:
            return known
        facts = Searched(loss)
        return self._origins.keep(loss, Origin("given", "?", stack, facts.value, facts=facts))

    def _end(self, clock: int, stack: RawStack) -> None:
        leaves = self._backward.leaves(clock)
        reached = self._backward.end(clock)
        self._rounds += 1
        # A reentrant checkpoint runs a backward within that of the loss.
        bad_loss = self._bad_losses.pop(clock, None) or next(iter(self._bad_losses.values()), None)
        if bad_loss is not None:
            # The gradients of a non-finite loss have its origin.
            reached = [(leaf, bad_loss) for leaf in leaves if _has_bad_gradient(leaf)]
        spoilt = [leaf for leaf, _ in reached if _has_bad_gradient(leaf)]
        for leaf, origin in reached:
            if leaf.grad is not None:
                came = Origin("passed", "backward", stack, origin.value, parents=(origin,))
                self._origins.keep(leaf.grad, came)
        # Gradients not used by a step (a GradScaler skips such a step) do no harm.
        self._pending_loss = None
        if bad_loss is not None and not spoilt:
            self._pending_loss = (bad_loss, self._rounds - 1)
        if spoilt and self._pending is None:
            first = min((origin for _, origin in reached), key=lambda one: one.number)
            self._pending = (spoilt, first, stack, self._rounds - 1)

    def _on_write(self, tensor: torch.Tensor, origin: Origin) -> None:
        number = max(self._rounds - 1, 0)
        self._updates.written(tensor, origin, self._leaves, number)

    def _on_consumed(
        self,
        parameters: list[torch.Tensor],
        origins: list[Origin],
        stack: RawStack,
        op: str,
        number: int,
        is_by_hand: bool = False,
    ) -> None:
        self._has_consumer = True
        if self._found < _MOST:
            if not origins:
                self._report_untraced(parameters, stack, op, number)
                return
            began = min(((first_cause(one)) for one in origins), key=lambda pair: pair[0].number)
            if began[0].how == "untraced":
                self._report_untraced(parameters, stack, op, number)
                return
            # Results computed with these parameters from now on are no findings of their own.
            for parameter in parameters:
                came = Origin("passed", op, stack, began[0].value, parents=tuple(origins))
                self._origins.keep(parameter, came)
            if began[0].number not in self._described:
                self._described.add(began[0].number)
                self._report(began, parameters, stack, op, number, "parameters", is_by_hand)
        self._pending = None

    def _on_harmless_step(self, number: int) -> None:
        """Note a step that left all parameters finite, perhaps after a non-finite loss."""
        if self._pending_loss is not None:
            self._harmless_loss = self._harmless_loss or (self._pending_loss[0], number)
            self._pending_loss = None

    def _report_untraced(self, parameters: list[torch.Tensor], stack: RawStack, op: str, number: int) -> None:
        """Report non-finite gradients of unknown origin: a collective, foreign code."""
        facts = Searched(parameters[0])
        came = self._origins.keep(parameters[0], Origin("passed", op, stack, facts.value))
        for parameter in parameters[1:]:
            self._origins.link(parameter, came)
        self._pending = None
        if self._found:
            return
        self._found += 1
        seen: NonFiniteSeen = "other_rank" if _torch.has_other_ranks() else "untraced"
        self._put(
            NonFinite(
                Birth("unknown", "", None, facts.value, facts.index, facts.shape, facts.dtype, facts.device),
                number,
                noticed=None if self._noticed is None else symbolise(self._noticed),
                consumed=None if stack is None else symbolise(stack),
                consumer=op,
                parameters=_names_of(parameters),
                losses=tuple(self._losses),
                seen=seen,
                spoilt=len(parameters),
            )
        )

    def _report_loss(self, origin: Origin, number: int, reached: Literal["loss", "stopped"]) -> None:
        began = first_cause(origin)
        self._pending_loss = None
        if began[0].number not in self._described and self._found < _MOST:
            self._described.add(began[0].number)
            self._report(began, [], None, None, number, reached)

    def examine(self, error: BaseException) -> None:
        """Report the loss behind an exception that has ended the program, such as its own check of the loss."""
        self._has_failed = True
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next

        # A distribution, for example, rejects non-finite parameters, with a message about it.
        is_about_values = _VALUES.search(str(error)) is not None

        def is_bad_loss(tensor: torch.Tensor) -> bool:
            is_one = tensor.numel() == 1 or is_about_values
            return bool(is_one and tensor.requires_grad and _torch.is_nonfinite(tensor))

        if self._found or trace is None:
            return
        known = [self._origins.of(one.tensor) for one in naming.find(trace.tb_frame, is_bad_loss)]
        origins = [origin for origin in known if origin is not None]
        if origins:
            self._noticed = None
            self._report_loss(min(origins, key=lambda one: one.number), self._rounds, "stopped")

    def settle(self) -> None:
        """Report, as the program ends, gradients that no step used, if the program has no step at all."""
        if self._pending is not None and not self._found and not self._updates.steps and not self._has_consumer:
            leaves, origin, _, number = self._pending
            self._pending = None
            if not self._has_failed and _have_optimizer(leaves):
                # Unused: a ``GradScaler`` skips the step.
                return
            self._report(first_cause(origin), leaves, None, None, number, "gradients")
        elif self._pending_loss is not None and not self._updates.steps:
            self._harmless_loss = self._pending_loss
        # In a diverging training the loss overflows its dtype before the parameters do.
        if self._harmless_loss is not None and not self._found:
            self._report_loss(*self._harmless_loss, "loss")
        self._pending = None

    def _report(
        self,
        began: tuple[Origin, tuple[Origin, ...]],
        parameters: list[torch.Tensor],
        stack: RawStack | None,
        op: str | None,
        number: int,
        reached: Literal["parameters", "gradients", "loss", "stopped"],
        is_by_hand: bool = False,
    ) -> None:
        origin, path_back = began
        if origin.how == "untraced":
            # A finding needs a parameter that it has reached.
            return
        names = _names_of(parameters)
        # Bad input data did harm where it was first combined with a parameter.
        born = _born(origin)
        taken = next((one for one in path_back if one.has_graph), origin) if born == "data" else origin
        if born == "forward" and is_by_hand and not any(one.has_graph for one in path_back[:-1]):
            born = "update"
        birth = Birth(
            born=born,
            op=taken.op,
            site=None if taken.stack is None else symbolise(taken.stack),
            value=origin.value,
            operands=origin.operands,
            name=names[0] if origin.how == "update" and names else taken.name or origin.name,
            scalars=origin.scalars,
            redrawn=origin.redrawn,
            **_shown(origin.facts),
        )
        path = tuple((one.op, symbolise(one.stack)) for one in path_back if one.stack is not None)
        self._found += 1
        self._put(
            NonFinite(
                birth,
                number,
                noticed=None if self._noticed is None else symbolise(self._noticed),
                consumed=None if stack is None else symbolise(stack),
                consumer=op,
                parameters=names,
                path=path,
                reached=reached,
                losses=tuple(self._losses),
            )
        )


def _names_of(parameters: list[torch.Tensor]) -> tuple[str, ...]:
    frame = sys._getframe()
    names = [known[0].text for one in parameters[:_NAMED] if (known := naming.names_of(one, frame))]
    return tuple(dict.fromkeys(names))


def _born(origin: Origin) -> Born:
    if origin.how == "update":
        return "update"
    if origin.how == "gradient" or origin.in_backward:
        return "backward"
    # An infinite number written into a tensor without gradient flow is data, too.
    is_data = origin.how == "given" or (origin.how == "constant" and not origin.has_graph)
    return "data" if is_data else "forward"


def _shown(facts: Searched | None) -> dict[str, Any]:
    if facts is None:
        return {}
    return {
        "index": facts.index,
        "shape": facts.shape,
        "dtype": facts.dtype,
        "device": facts.device,
        "elements": facts.elements,
        "of": facts.of,
    }


def _have_optimizer(leaves: list[torch.Tensor]) -> bool:
    owned = set(map(id, _torch.parameters_of(*optimizers_alive())))
    return any(id(leaf) in owned for leaf in leaves)


def _has_bad_gradient(leaf: torch.Tensor) -> bool:
    return leaf.grad is not None and _torch.is_nonfinite(leaf.grad)
