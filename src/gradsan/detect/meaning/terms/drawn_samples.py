"""Samples drawn without a graph where ``rsample`` has one: what made the mean and the spread learns nothing from them.

Row: ``term_is_cut``. Roles: ``read`` (the draw; ``op``; ``values``: ``shape``, ``dtype``, ``device`` of the sample,
``how``: ``drawn``), ``added`` (where the sample was first used).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsan import _torch, source
from gradsan.detect.meaning.rounds import RoundDetector
from gradsan.detect.meaning.terms.constant_terms import numbers_below
from gradsan.model import Clue, Site
from gradsan.record.detector import Run
from gradsan.record.log import RawStack
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "term_is_cut"
_FOLLOWED, _USES = 256, 16
COMPARES = frozenset({"sub", "__sub__", "__rsub__", "rsub", "subtract", "gaussian_nll_loss", "mse_loss", "l1_loss"})
_WITHOUT_GRAPH = frozenset({"no_grad", "inference_mode", "set_grad_enabled"})
_WITH_RSAMPLE = frozenset({"normal", "distribution"})
"""Modules of ``torch.distributions`` with a ``sample`` whose distributions have an ``rsample``, too."""


@dataclass(slots=True, eq=False)
class _Draw:
    """A sample: the numbers of the Nodes of its distribution's parameters, or negative ``id``, and of its uses."""

    stack: RawStack
    facts: dict[str, Any]
    parameters: set[int]
    uses: list[tuple[int, RawStack]] = field(default_factory=list)
    is_meant: bool = False


class DrawnSamples(RoundDetector):
    """Follows samples drawn without a graph in some rounds; findings go to ``found``.

    ``torch.distributions`` draws with ``sample()`` under ``no_grad``. A decoder that gets such a latent trains itself,
    and what made the mean and the spread learns from the other terms alone, such as the Kullback-Leibler divergence.
    Reported if the distribution has an ``rsample``, and the loss depends on results computed with the sample, and on
    the parameters of its distribution, too.

    Nothing is reported where a density is computed from the sample: in a ``log_prob``, or together with a parameter of
    its distribution (score functions, straight-through estimates); where data is compared with such a parameter, which
    then predicts it (a model that is fed its own predictions); where the sample was drawn under a ``no_grad`` of the
    program's own, or detached; and where the program's file calls ``rsample`` for other samples.
    """

    from_start = True

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._held: dict[int, tuple[Any, tuple[_Draw, ...]]] = {}
        self._compared: set[int] = set()

    def begins(self, entry: RawBackward) -> bool:
        """Drop the samples followed before."""
        self._held.clear()
        self._compared.clear()
        return True

    def detached(self, sample: Any) -> None:
        """Note that the program detaches a value; ``detach`` is watched by one detector alone."""
        for draw in self._of(sample):
            draw.is_meant = True

    def result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Follow samples, and what is computed from them, to their uses with values with a graph."""
        is_recording = _torch.is_grad_enabled()
        if is_recording and not self._held and op not in COMPARES:
            return
        given = _torch.tensors_of_call(args, kwargs)
        if is_recording and op in COMPARES:
            self._note_compared(given)
        draws = tuple(dict.fromkeys(draw for one in given for draw in self._of(one)))
        if is_recording and not draws:
            return
        for made in _torch.tensors_in(result):
            if made.requires_grad:
                self._used(draws, made, given)
                continue
            own = draws if is_recording else (*draws, *self._drawn(made, given))
            if own and len(self._held) < _FOLLOWED:
                self._held[id(made)] = _torch.weak_tensor(made), own

    def _note_compared(self, given: list[Any]) -> None:
        """Note the values that are compared with data, other than in a Kullback-Leibler divergence."""
        own = [one for one in given if one.requires_grad]
        if own and len(own) < len(given) and "kl_divergence" not in _calls_within(self._core.stack()):
            self._compared.update(*map(_numbers, own))

    def _of(self, tensor: torch.Tensor) -> tuple[_Draw, ...]:
        weak, draws = self._held.get(id(tensor), (None, ()))
        return draws if weak is not None and weak() is tensor else ()

    def _drawn(self, made: Any, given: list[Any]) -> list[_Draw]:
        stack = self._core.stack()
        is_drawn = made.is_floating_point() and _is_sample(stack)
        parameters = {numbers[-1] for one in given if (numbers := _numbers(one))} if is_drawn else set[int]()
        return [_Draw(stack, _torch.facts_of(made), parameters)] if parameters else []

    def _used(self, draws: tuple[_Draw, ...], made: Any, given: list[Any]) -> None:
        number = _torch.node_sequence(_torch.grad_fn_of(made))
        stack = self._core.stack()
        is_density = "log_prob" in _calls_within(stack)
        others = {found for one in given for found in _numbers(one)}
        for draw in draws:
            draw.is_meant = draw.is_meant or is_density or not others.isdisjoint(draw.parameters)
            if number is not None and len(draw.uses) < _USES:
                draw.uses.append((number, stack))

    def looks(self, entry: RawBackward, is_last: bool) -> None:
        """Check whether this loss depends on a sample and on its distribution."""
        drawn = dict.fromkeys(draw for _, draws in self._held.values() for draw in draws if draw.uses)
        if not drawn or entry.stack in self._described:
            return
        ran = set(numbers_below(*read_backward(entry).roots, most=None))
        for draw in drawn:
            used = next((stack for number, stack in draw.uses if number in ran), None)
            is_scored = draw.is_meant or not self._compared.isdisjoint(draw.parameters)
            if used is None or is_scored or ran.isdisjoint(draw.parameters):
                continue
            site = symbolise(draw.stack)
            if _is_drawn_on_purpose(site):
                continue
            self._described.add(entry.stack)
            self._report_at(
                ROW,
                entry.stack,
                Clue("read", site, op="sample", values={**draw.facts, "how": "drawn"}),
                Clue("added", symbolise(used)),
            )
            return


def _numbers(tensor: torch.Tensor) -> list[int]:
    """Return the numbers of a value's Node and of that of its base, the base last; for a leaf, its negative ``id``."""
    base = tensor if tensor._base is None else tensor._base
    leaf = [-id(base)] if _torch.is_trainable_leaf(base) else []
    numbers = [_torch.node_sequence(_torch.grad_fn_of(tensor)), _torch.node_sequence(_torch.grad_fn_of(base))]
    return [*(one for one in numbers if one is not None), *leaf]


def _is_drawn_on_purpose(drawn: Site) -> bool:
    """Whether the program draws a sample under its own ``no_grad``, or in a file that calls ``rsample`` for others."""
    frame, around = drawn.user_frame, source.context_around(drawn.user_frames, _WITHOUT_GRAPH)
    return frame is None or around is not None or source.draws_both(frame)


def _calls_within(stack: RawStack) -> list[str]:
    """Return the functions of ``torch.distributions`` that made a call, innermost first."""
    return [name for _, name in _distributions_of(stack)]


@functools.lru_cache(maxsize=1024)
def _is_sample(stack: RawStack) -> bool:
    """Whether the innermost ``sample`` of ``torch.distributions`` on a stack is of one with an ``rsample``."""
    return next((file in _WITH_RSAMPLE for file, name in _distributions_of(stack) if name == "sample"), False)


def _distributions_of(stack: RawStack) -> list[tuple[str, str]]:
    split = ((os.path.split(code.co_filename), code.co_name) for code in stack.codes)
    folder = f"{_torch.package_folder()}distributions"
    return [(file.removesuffix(".py"), name) for (found, file), name in split if found == folder]
