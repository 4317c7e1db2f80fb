"""Self-check that gradsan works with this torch, run once, when a process is first watched.

It runs below the program's modes, with gradients on and on the CPU, and draws no random number. Where hooks or a
transform of the program's would take part, it is postponed to the next time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsan import _torch
from gradsan.graph import stale_slots, walk
from gradsan.model import Message


def before_watching() -> list[Message] | None:
    """Return the problems found in a graph of three operations: stale slots, sequence numbers. Empty if there are none.

    None where nothing was checked.
    """
    if _torch.is_transformed() or _torch.is_compiling() or _torch.has_hooks():
        return None
    return _below_modes(_graph)


def while_watching() -> list[Message]:
    """Return problems with tensors while gradsan's wrappers are in place; empty if they behave as without."""
    return _below_modes(_types)


def _graph() -> list[Message]:
    leaf = torch.ones(2, requires_grad=True, dtype=torch.float32, device="cpu")
    first = _torch.sequence_number()
    middle = leaf.exp()
    result = (middle * 2).sum()
    problems = []
    order = walk.engine_order(walk.roots_of([result]))
    numbers = [_torch.node_sequence(node) for node in order]
    if numbers != [first + 2, first + 1, first] or _torch.sequence_number() != first + 3:
        problems.append(_said("numbers"))
    if not _finds_nothing_else(result, middle):
        problems.append(_said("stale"))
    return problems


def _finds_nothing_else(result: torch.Tensor, middle: torch.Tensor) -> bool:
    """Whether the slot of ``middle`` is found once that is written, and none is before."""
    roots = walk.roots_of([result])
    if stale_slots.stale_errors(roots):
        return False
    with torch.no_grad():
        middle.zero_()
    found = [(stale.slot, stale.is_output) for stale in stale_slots.further_stale(roots)]
    return found == [("result", True)] and len(stale_slots.stale_errors(roots)) == 1


def _types() -> list[Message]:
    one = torch.ones((), dtype=torch.float32, device="cpu")
    try:
        same = torch.tensor([one], dtype=torch.float32, device="cpu").tolist() == [1.0] and one + 1 == 2 and bool(one)
    except (TypeError, RuntimeError):
        same = False
    return [] if same else [_said("types")]


def _below_modes(check: Callable[[], list[Message]]) -> list[Message]:
    try:
        with _torch.hushed(), _torch.without_dispatch_modes(), torch.inference_mode(False), torch.enable_grad():
            return check()
    except Exception as failure:
        return [_said("failed", f"{type(failure).__name__}: {failure}")]


def _said(what: str, error: str = "") -> Message:
    values = {"torch": str(torch.__version__)}
    return Message(f"blind.self_check_{what}", {**values, "error": error} if error else values)
