"""What a run computes, written down in the child: gradients at every step and backward, and the losses."""

from __future__ import annotations

import contextlib
import math
import zlib
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from gradsan.repair.left_over import LeftOver
from gradsan.repair.trial import Gradients, Recording

_NUMBERS_KEPT = 200_000
"""Per gradient; of larger ones evenly spaced elements are kept beside the norm."""

_NUMBERS_LOOKED_AT = 64
"""Of a leaf, to know it again in the other run."""

_BYTES_KEPT = 512 * 1024 * 1024
_MEASURED: tuple[type[BaseException], ...] = (RuntimeError, NotImplementedError)


class EnoughSteps(SystemExit):
    """Ends the program when it has made the steps that were asked for."""


class Recorder:
    """Listens to optimizers and to backward calls."""

    def __init__(self, steps: int) -> None:
        """End the program after ``steps`` optimizer steps; 0: never."""
        self._limit = steps
        self._made = 0
        self._bytes = 0
        self._steps: list[Gradients] = []
        self._backwards: list[Gradients] = []
        self._losses: list[float] = []
        self._begun: list[float] = []
        self._labels: Any = WeakIdKeyDictionary()
        self._met: dict[str, int] = {}
        self._ends_with_backward = False
        self._left_over = LeftOver()

    def start(self) -> None:
        """Begin to listen to optimizers."""
        self._left_over.start()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def recording(self, finished: bool, exception: tuple[str, str] | None) -> Recording:
        """What was recorded."""
        was_ended = bool(self._limit and self._made >= self._limit)
        # Where the limit ends a program there is more to come, and not at the same place in every candidate.
        undecided: list[Gradients] = []
        for key, gradients in [] if was_ended else self._left_over.undecided():
            self._keep(undecided, key, gradients)
        return Recording(
            tuple(self._steps),
            tuple(self._backwards),
            tuple(self._losses),
            tuple(self._begun),
            finished or was_ended,
            exception,
            self._bytes >= _BYTES_KEPT,
            self._backwards[-1] if self._backwards and self._ends_with_backward else None,
            tuple(undecided),
        )

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _has_closure(args, kwargs):
            self._keep_step(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            # The gradients are those that the closure has computed, the last time it was called.
            self._keep_step(optimizer)
        self._made += 1
        self._ends_with_backward = False
        if self._limit and self._made >= self._limit:
            raise EnoughSteps(0)

    def _keep_step(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        key = "step " + ";".join("x".join(map(str, p.shape)) for p in parameters)
        self._keep(self._steps, key, [p.grad for p in parameters])
        self._left_over.step(optimizer, key)

    def before_backward(self, entry: Any, *_: Any) -> None:
        """To be called with the entry of every backward that begins."""
        self._begun.extend(_scalars(entry[3]))

    def after_backward(self, entry: Any) -> None:
        """To be called with the entry of every backward that ended."""
        outputs, accumulates = entry[3], entry[5]
        self._losses.extend(_scalars(outputs))
        if accumulates:
            leaves = _leaves(outputs)
            self._ends_with_backward = True
            self._keep(self._backwards, "backward", [leaf.grad for leaf in leaves], self._labels_of(leaves))

    def _keep(self, records: list[Gradients], key: str, gradients: list[Any], labels: tuple[str, ...] = ()) -> None:
        if self._bytes < _BYTES_KEPT:
            values = tuple(_numbers(gradient) for gradient in gradients)
            self._bytes += sum(len(value[1]) for value in values if value is not None)
            records.append(Gradients(key, values, labels))

    def _labels_of(self, leaves: list[Any]) -> tuple[str, ...]:
        """What a leaf is known by: its shape and its values when it was first met, whatever the order of the graph."""
        for leaf in leaves:
            if leaf not in self._labels:
                look = _look(leaf)
                self._met[look] = self._met.get(look, 0) + 1
                self._labels[leaf] = f"{look} {self._met[look]}"
        return tuple(self._labels[leaf] for leaf in leaves)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The optimizer itself is the first of the arguments.
    given = args[1] if len(args) > 1 else kwargs.get("closure")
    return given is not None


def _scalars(outputs: Any) -> list[float]:
    found: list[float] = []
    for output in outputs:
        if torch.is_tensor(output) and output.numel() == 1:
            with contextlib.suppress(*_MEASURED):
                found.append(float(output.detach()))
    return found


def _numbers(gradient: Any) -> tuple[tuple[int, ...], bytes, float] | None:
    if gradient is None:
        return None
    with torch.no_grad():
        own = _own_part(gradient.detach())
        dense = own.to_dense() if own.layout is not torch.strided else own
        flat = torch.view_as_real(dense.resolve_conj()).reshape(-1) if dense.is_complex() else dense.reshape(-1)
        flat = flat.to("cpu", torch.float64)
        norm = float(torch.linalg.vector_norm(flat)) if flat.numel() else 0.0
        kept = flat[:: math.ceil(flat.numel() / _NUMBERS_KEPT)] if flat.numel() > _NUMBERS_KEPT else flat
        return tuple(gradient.shape), bytes(kept.contiguous().numpy().tobytes()), norm


def _own_part(tensor: Any) -> Any:
    """What this process holds of a tensor that is spread over several; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _look(leaf: Any) -> str:
    numbers: list[Any] = []
    # A parameter that was gathered from its shards has no memory while its module does not run.
    with torch.no_grad(), contextlib.suppress(*_MEASURED):
        own = _own_part(leaf.detach())
        flat = own.reshape(-1) if own.layout is torch.strided else own.to_dense().reshape(-1)
        numbers = flat[:: max(1, flat.numel() // _NUMBERS_LOOKED_AT)].tolist()
    return f"{tuple(leaf.shape)} {leaf.dtype} {zlib.crc32(repr(numbers).encode())}"


def _leaves(outputs: Any) -> list[Any]:
    """The leaves that a backward reaches, in an order that the shape of the graph decides."""
    seen: set[Any] = set()
    found: list[Any] = []
    stack = [node for output in reversed(outputs) if (node := getattr(output, "grad_fn", None)) is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if torch.is_tensor(leaf):
            found.append(leaf)
        stack.extend(child for child, _ in reversed(node.next_functions) if child is not None)
    return found
