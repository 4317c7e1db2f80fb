"""Results that the reference run has of its own: of custom Functions, and of calls that PyTorch refuses.

A Function that returns its input, or a view of it, as module hooks of gradients do, gives a result that PyTorch lets
nobody write: the write would change the input too, past the Function's backward. A copy may be written, and is the same
to the program as long as nothing reads the input afterwards. If anything does, the run ends there: which values the
input is to have then is not known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from gradsan import _torch

_Pair = tuple[Any, Any]


class OwnResults:
    """Copies of such results, each with the input that it would share memory with."""

    is_over = False
    """Whether the program has ended: what looks at its variables then is not a part of it."""

    def __init__(self) -> None:
        self._pairs: list[_Pair] = []

    def install(self) -> None:
        """Have Functions, and the gradient hooks of modules, give such copies from now on."""
        apply = inspect.getattr_static(torch.autograd.Function, "apply")

        def copied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = apply.__get__(None, cls)(*args, **kwargs)
            # Module hooks look for the Node of the view.
            return result if _torch.hands_gradients_through(cls) else self.copies(result)

        torch.autograd.Function.apply = classmethod(copied)  # type: ignore[assignment]
        owner, name = _torch.hooked_tensors()
        if owner is not None:
            setattr(owner, name, self._around_hooked(getattr(owner, name)))

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise ``RuntimeError`` if ``args`` have an input whose copy the program has written."""
        self._pairs[:] = [(copy, base) for copy, base in self._pairs if copy() is not None and base() is not None]
        written = {_torch.storage_or_none(base()) for copy, base in self._pairs if copy()._version}
        is_read = written and any(_torch.storage_or_none(one) in written for one in _torch.tensors_in(args))
        if is_read and not self.is_over:
            raise RuntimeError("the input of a Function is read after its result, a view of it, was written")

    def _around_hooked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            given, places = original(*args, **kwargs)
            return self.copies(given), places

        return hooked

    def copies(self, result: Any) -> Any:
        """``result`` with a copy in place of each recorded view in it."""
        if type(result) in (list, tuple):
            return type(result)(map(self._copy, result))
        return self._copy(result)

    def _copy(self, one: Any) -> Any:
        if not torch.is_tensor(one) or one._base is None or one.grad_fn is None:
            return one
        made = one.clone()
        self._pairs.append((_torch.weak_tensor(made), _torch.weak_tensor(one._base)))
        return made


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
