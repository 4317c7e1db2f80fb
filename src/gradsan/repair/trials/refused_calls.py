"""Refused calls, carried out for the reference run: deep copies and flags of results, reads of what is written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gradsan import _torch


def carried_out(failure: RuntimeError, wanted: Collection[str], args: Any) -> Callable[[], Any] | None:
    """What does the call that PyTorch refused with ``failure``; None for any other, and where it is not ``wanted``."""
    text = str(failure)
    for words, allowance, carry in _REFUSED:
        if words in text and allowance in wanted and args and torch.is_tensor(args[0]):
            return lambda: carry(*args)
    return None


def apart(source: Any, written: Any) -> Any:
    """A copy of a tensor that shares memory with the one that is ``written``; anything else, and that one, itself."""
    is_shared = (
        torch.is_tensor(source)
        and source is not written
        and _torch.storage_or_none(source) == _torch.storage_or_none(written)
    )
    return source.clone() if is_shared else source


def _copied(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """A copy with the graph, so that a loss trains what is behind it as the copied tensor would."""
    return tensor.clone()


def _copied_plain(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.detach().clone()


def _cut(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor.detach_()


def _unflagged(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor


_REFUSED: tuple[tuple[str, str, Callable[..., torch.Tensor]], ...] = (
    ("support the deepcopy protocol", "graph_copies", _copied),
    ("support the deepcopy protocol", "plain_copies", _copied_plain),
    ("you can only change requires_grad flags of leaf variables", "cut_results", _cut),
    ("dtype can require gradients", "plain_integers", _unflagged),
)
"""The words of the message, the allowance, and what is done with the arguments of the call."""
