"""What the backward of a custom Function returns: without the gradient it is given, or without a graph of its own.

A backward that reads none of the gradients it is given is right only where these are one, or where forward is the
identity.

``ctx.sig = torch.sigmoid(x)`` is computed where autograd does not record. Under ``create_graph=True`` a backward that
returns ``grad * ctx.sig`` then has a graph to ``grad`` alone, and what differentiates it once more (a penalty on the
gradient, a Hessian) takes the derivative of the Function for a constant. This is measured for Functions of one input,
element by element: the factor between what a backward gets and returns, which follows the input smoothly and is the
slope of forward there. A factor of few values (a mask, a slope of leaky ReLU) has no derivative to be lost, and one
that is no slope of forward (a surrogate, a straight-through estimate) is what the program defines.

Row ``gradient_ignored``: role ``applied`` (the call of the Function; ``name`` of it), ``backward`` (its definition).
Row ``second_derivative_lost``: these roles, ``backward`` with the ``name`` of what it reads from ``ctx``, if anything,
and its ``values``: ``shape``, ``dtype``, ``device``.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan._collector import cached_by_class
from gradsan.graph.bytecode import functions_of, getattr_static
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.guarding import Guard, after_node, before_node
from gradsan.record.log import Core, RawStack
from gradsan.record.stacks import symbolise
from gradsan.record.steps import running_here

IGNORED, LOST = "gradient_ignored", "second_derivative_lost"
_FOLLOWED, _APPLIED_FIRST = 2, 16
_ELEMENTS, _FEWEST = 512, 32
_LINEAR = frozenset(
    {
        *("MulBackward0", "DivBackward0", "NegBackward0", "ViewBackward0", "ReshapeAliasBackward0", "CloneBackward0"),
        *("UnsafeViewBackward0", "ToCopyBackward0", "WhereBackward0", "MaskedFillBackward0", "AliasBackward0"),
    }
)
"""Nodes that are linear in the one input that has a graph."""


class FunctionBackwards:
    """Measures what the backwards of some calls return; findings go to ``found``."""

    def __init__(self, core: Core, guard: Guard, found: Callable[[Failure], None]) -> None:
        self._core, self._guard, self._found = core, guard, found
        # By code: a class would live on.
        self._ignoring, self._seen = Counter[CodeType](), set[tuple[str, CodeType]]()
        self._applied = Counter[CodeType]()

    def applied(self, kind: Any, node: Node, args: tuple[Any, ...], result: Any) -> None:
        """Follow the backward of a call that has made ``node``."""
        code = _own_backward(kind)
        if code is None:
            return
        if _ignores(kind) and self._ignoring[code] < _FOLLOWED and not _passes_on(result, args):
            self._ignoring[code] += 1
            self._follow(node, functools.partial(self._ran_ignoring, kind.__name__, code, self._core.stack(2)))
        self._applied[code] += 1
        count = self._applied[code]
        if (LOST, code) not in self._seen and (count <= _APPLIED_FIRST or count & (count - 1) == 0):
            self._follow_factor(kind, code, node, args, result)

    def _follow(self, node: Node, ran: Callable[[Any, Any], None]) -> None:
        after_node(node, lambda *of: self._guard.run_hushed(functools.partial(ran, *of)))

    def _ran_ignoring(self, name: str, code: CodeType, stack: RawStack, given: Any, taken: Any) -> None:
        """Report a backward that has not read gradients other than one, and has returned some."""
        with torch.no_grad():
            returned = any(one is not None and bool(one.any()) for one in given)
            is_read = any(one is not None and not bool((one == 1).all()) for one in taken)
        if returned and is_read:
            self._report(IGNORED, name, code, stack)

    def _report(self, row: str, name: str, code: CodeType, stack: RawStack, read: Any = (None, {})) -> None:
        if (row, code) in self._seen:
            return
        self._seen.add((row, code))
        frame = Frame(code.co_filename, code.co_firstlineno, code.co_name, is_user=True)
        path, facts = read
        backward = Clue("backward", Site((frame,)), name=path, values=facts)
        clues = Clue("applied", symbolise(stack), name=name), backward
        entry = running_here(self._core)
        site = symbolise(stack if entry is None else entry.stack)
        self._found(Failure(row, "", "", site, clues, raised=False))

    @_torch.hushed()
    def _follow_factor(self, kind: Any, code: CodeType, node: Node, args: tuple[Any, ...], result: Any) -> None:
        given = [one for one in args if torch.is_tensor(one)]
        wanted = [at for at, one in enumerate(given) if one.requires_grad]
        if len(wanted) != 1 or not torch.is_tensor(result) or not _is_measured(given[wanted[0]], result):
            return
        x, at = given[wanted[0]], wanted[0]
        if x is result or _torch.storage_or_none(x) == _torch.storage_or_none(result):
            return
        ran = functools.partial(
            self._ran_with_graph, kind.__name__, code, self._core.stack(2), at, _sample(x), _sample(result)
        )
        self._follow(node, functools.partial(_if_recorded, ran))

    def _ran_with_graph(
        self, name: str, code: CodeType, stack: RawStack, at: int, x: Any, y: Any, given: Any, taken: Any
    ) -> None:
        """Wait for the use of a gradient whose factor is the slope of forward, and has no graph."""
        returned, got = given[at] if at < len(given) else None, taken[0]
        if returned is None or got is None or returned.shape != got.shape or returned.grad_fn is None:
            return
        if (LOST, code) in self._seen or not _is_linear_in(returned.grad_fn, got.grad_fn):
            return
        with torch.no_grad():
            if not _is_slope(x, y, _sample(returned), _sample(got)):
                return
        read = _read_of_context(_torch.current_node())
        report = functools.partial(self._report, LOST, name, code, stack, read)
        before_node(returned.grad_fn, lambda _: self._guard.run_hushed(report))


def _if_recorded(ran: Callable[[Any, Any], None], given: Any, taken: Any) -> None:
    if torch.is_grad_enabled():
        ran(given, taken)


def _is_measured(x: torch.Tensor, y: torch.Tensor) -> bool:
    # Reading from a device would synchronise.
    is_plain = all(one.is_cpu and one.layout is torch.strided and one.is_floating_point() for one in (x, y))
    return is_plain and x.shape == y.shape and x.numel() >= _FEWEST


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _ELEMENTS)].to(torch.float64, copy=True)


def _is_linear_in(node: Any, end: Any) -> bool:
    """Whether a chain of Nodes leads from ``node`` to ``end``, by one path, and multiplies by constants alone."""
    for _ in range(32):
        if node is end or node is None:
            return node is not None
        below = [child for child, _ in node.next_functions if child is not None]
        if node.name() not in _LINEAR or len(below) != 1 or (node.name().startswith("Div") and _divides(node)):
            return False
        node = below[0]
    return False


def _divides(node: Any) -> bool:
    return node.next_functions[0][0] is None


def _is_slope(x: torch.Tensor, y: torch.Tensor, returned: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the factor from ``got`` to ``returned`` is the slope of ``y`` over ``x``, and varies with ``x``."""
    if not x.shape == y.shape == returned.shape == got.shape:
        return False
    kept = (got.abs() > 1e-4 * got.abs().max()) & x.isfinite() & y.isfinite() & returned.isfinite()
    x, y, factor = x[kept], y[kept], (returned / got)[kept]
    if x.numel() < _FEWEST:
        return False
    order = x.argsort()
    x, y, factor = x[order], y[order], factor[order]
    spread, largest = factor.max() - factor.min(), factor.abs().max()
    if spread <= 0.05 * largest or factor.unique().numel() <= factor.numel() // 2:
        return False
    apart = x.diff()
    between = (factor[1:] + factor[:-1]) / 2
    # Far out, where both are next to zero, all functions look alike.
    shown = (apart > 1e-4 * (x[-1] - x[0])) & (between.abs() > 0.1 * largest)
    near = (y.diff() / apart - between).abs() <= 0.15 * between.abs()
    return bool(shown.sum() >= _FEWEST // 2 and near[shown].double().mean() > 0.85)


def _read_of_context(node: Any) -> tuple[str | None, dict[str, Any]]:
    """The first tensor that the backward of ``node`` reads from an attribute of ``ctx``: its name and facts."""
    from gradsan.detect.function_conflicts import kept_values

    kind = None if node is None else _torch.function_class(node)
    kept = kept_values(kind, vars(node)) if kind is not None else ()
    return next(((f"ctx.{path}", _torch.facts_of(one)) for path, one in kept if _torch.is_tensor(one)), (None, {}))


@cached_by_class
def _own_backward(kind: Any) -> CodeType | None:
    """Return the code of the program's own backward."""
    functions = functions_of(getattr_static(kind, "backward"))
    own = [one for one in functions if one.__module__.partition(".")[0] != "torch"]
    return own[-1].__code__ if own else None


@cached_by_class
def _ignores(kind: Any) -> bool:
    """Whether the program's own backward reads none of the gradients it is given."""
    code = _own_backward(kind)
    if code is None or code.co_argcount < 2 or code.co_flags & inspect.CO_VARARGS:
        return False
    given = set(code.co_varnames[1 : code.co_argcount])
    loaded = [one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD")]
    read = {name for one in loaded for name in (one if isinstance(one, tuple) else (one,)) if isinstance(name, str)}
    return not (given & (read | set(code.co_cellvars)) or "locals" in read)


@_torch.hushed()
def _passes_on(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether forward returns an input as it is: to give it another gradient is all that the Function is for."""
    facts = _torch.facts_of(result) if torch.is_tensor(result) else None
    alike = [one for one in args if torch.is_tensor(one) and _torch.facts_of(one) == facts]
    return any(not one.is_meta and torch.equal(one, result) for one in alike)
