"""Guard for gradsan's own work in the middle of the program: what fails becomes a blind spot."""

from __future__ import annotations

import functools
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

from gradsan import _torch
from gradsan._errors import GradsanError
from gradsan.model import Message
from gradsan.record._writer_pure import is_of_signal

# Missing: handlers of signals and finalisers of the program's may run in the middle of a hook of gradsan's.
try:
    from gradsan.record._native import call_own as _call_own
except ImportError:

    def _call_own(hook: Callable[..., Any], /, *args: Any) -> Any:
        return hook(*args)


def own(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of gradsan's own as torch is to call it: tracers do not see it, nor does the program's code come in."""
    return functools.partial(_call_own, hook)


_numbers = itertools.count(-1, -1)


def numbered_apart(handle: Any) -> Any:
    """The handle of a hook of gradsan's own, registered just now; the program's get the numbers they have without."""
    hooks = handle.hooks_dict_ref()
    if RemovableHandle.next_id == handle.id + 1 and handle.id in hooks:
        hook = hooks.pop(handle.id)
        RemovableHandle.next_id = handle.id
        handle.id = next(_numbers)
        hooks[handle.id] = hook
    return handle


def before_node(node: Any, hook: Callable[[Any], object]) -> Any:
    """Have ``hook``, which is gradsan's own, called before a Node runs in a backward; gives the handle."""
    return numbered_apart(node.register_prehook(own(hook)))


def after_node(node: Any, hook: Callable[[Any, Any], object]) -> Any:
    """The same after it has run."""
    return numbered_apart(node.register_hook(own(hook)))


class Guard:
    """Does such work, and remembers what this run did that gradsan could not see, or failed to look at.

    With ``GRADSAN_DEBUG`` in the environment a failure is shown, too.
    """

    def __init__(self) -> None:
        """Nothing has failed yet."""
        self.blind_spots: dict[str, Message] = {}

    def note(self, message: Message) -> None:
        """Remember something, once."""
        self.blind_spots.setdefault(f"{message.key} {message.values}", message)

    def note_failure(self, failure: Exception) -> None:
        """Remember that looking at something has failed."""
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exception(failure)
        self.note(Message("blind.collect_failed", {"error": _described(failure)}))

    def run(self, work: Callable[[], object]) -> None:
        """Do some work, unseen by the program's dispatch modes.

        Raises only :class:`GradsanError`, by which gradsan stops a program on request, and what a signal's handler of
        the program's has raised meanwhile, with the modes as they were.
        """
        before = _torch.modes_now()
        try:
            if _torch.has_dispatch_modes():
                with _torch.without_dispatch_modes():
                    work()
            else:
                work()
        except BaseException as failure:
            _torch.put_modes_back(*before)
            if not isinstance(failure, Exception) or isinstance(failure, GradsanError) or is_of_signal(failure):
                raise
            self.note_failure(failure)

    def run_hushed(self, work: Callable[[], object]) -> None:
        """The same for work that only reads tensors: the program's own ``__torch_function__`` is not asked."""
        before = _torch.modes_now()
        try:
            with _torch.hushed():
                self.run(work)
        except BaseException:
            _torch.put_modes_back(*before)
            raise

    def install(self, name: str, part: Callable[[], None]) -> None:
        """Run the part ``name`` of the installation; where this torch does not take it, the program runs on without it.

        With ``GRADSAN_DEBUG`` its failure is raised.
        """
        try:
            part()
        except Exception as failure:
            if os.environ.get("GRADSAN_DEBUG"):
                raise
            self.note(Message("blind.part_not_watched", {"part": name, "error": _described(failure)}))


def _described(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
