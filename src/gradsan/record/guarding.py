"""Guard for gradsan's own work within the program: failures become blind spots."""

from __future__ import annotations

import functools
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gradsan import _torch
from gradsan._errors import GradsanError
from gradsan.model import Message
from gradsan.record._writer_pure import is_of_signal

# Missing: the program's signal handlers and finalisers may run in the middle of a hook of gradsan's.
try:
    from gradsan.record._native import call_own as _call_own
except ImportError:
    from gradsan.record._writer_pure import call_own as _call_own


def own(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook of gradsan's for torch to call: hidden from tracers, and no code of the program runs within it."""
    return functools.partial(_call_own, hook)


_numbers = itertools.count(-1, -1)


def numbered_apart(handle: Any) -> Any:
    """Renumber gradsan's hook registered just now and return its handle: the program's ids stay as without gradsan."""
    hooks = handle.hooks_dict_ref()
    if RemovableHandle.next_id == handle.id + 1 and handle.id in hooks:
        hook = hooks.pop(handle.id)
        RemovableHandle.next_id = handle.id
        handle.id = next(_numbers)
        hooks[handle.id] = hook
    return handle


def before_node(node: Node, hook: Callable[[Any], object]) -> Any:
    """Register ``hook``, gradsan's own, to be called before a Node runs in a backward; return the handle."""
    return numbered_apart(node.register_prehook(own(hook)))


def after_node(node: Node, hook: Callable[[Any, Any], object]) -> Any:
    """Register ``hook`` likewise, to be called after the Node has run."""
    return numbered_apart(node.register_hook(own(hook)))


class Guard:
    """Runs work of gradsan's own, and collects blind spots: what it could not see, or failed to check.

    With ``GRADSAN_DEBUG`` in the environment failures are printed, too.
    """

    def __init__(self) -> None:
        self.blind_spots: dict[str, Message] = {}

    def note(self, message: Message) -> None:
        """Add a blind spot, once."""
        self.blind_spots.setdefault(f"{message.key} {message.values}", message)

    def note_failure(self, failure: Exception) -> None:
        """Add the blind spot of a failure in gradsan's own work."""
        if os.environ.get("GRADSAN_DEBUG"):
            traceback.print_exception(failure)
        self.note(Message("blind.collect_failed", {"error": _described(failure)}))

    def run(self, work: Callable[[], object]) -> None:
        """Run ``work``, hidden from the program's dispatch modes.

        Raises only :class:`GradsanError`, by which gradsan stops a program on request, and errors of the program's own
        signal handlers; the modes are restored before.
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
        """Run work that only reads tensors: also without calling the program's own ``__torch_function__``."""
        before = _torch.modes_now()
        try:
            with _torch.hushed():
                self.run(work)
        except BaseException:
            _torch.put_modes_back(*before)
            raise

    def install(self, name: str, part: Callable[[], None]) -> None:
        """Install the part ``name``; where this torch does not take it, the program runs on without it.

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
