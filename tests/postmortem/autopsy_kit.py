"""Helpers for the tests of autopsies: a recorder, and an instrument that finds the failing Node without gradsan."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradsan.model import Conflict, Site
from gradsan.record.recorder import Recorder

VERSION_ERROR = "one of the variables needed for gradient computation has been modified by an inplace operation"

# Making a recorder's wrappers takes a tenth of a second or more; switching it on again does not.
recorder_of = functools.cache(Recorder)


@contextlib.contextmanager
def recording(native: bool | None = None) -> Iterator[Recorder]:
    recorder = recorder_of(native)
    recorder.core.clear()
    recorder.conflicts.clear()
    recorder.guard.blind_spots.clear()
    stretch = recorder.start()
    try:
        yield recorder
    finally:
        recorder.stop(stretch)


def nodes_behind(*outputs: Any) -> list[Any]:
    """All Nodes behind some tensors, the same Nodes of two equal graphs in the same order."""
    waiting = [one.grad_fn for one in outputs if one.grad_fn is not None]
    found: dict[Any, None] = {}
    while waiting:
        node = waiting.pop(0)
        if node not in found:
            found[node] = None
            waiting += [child for child, _ in node.next_functions if child is not None]
    return list(found)


def failing_node(backward: Callable[[], Any], nodes: list[Any]) -> int:
    """The position among ``nodes`` of the one at which ``backward`` stops: the last whose prehook runs."""
    entered: list[int] = []
    for position, node in enumerate(nodes):
        node.register_prehook(lambda _, position=position: entered.append(position))
    with contextlib.suppress(RuntimeError):
        backward()
        raise AssertionError("this backward was to fail, and did not")
    return entered[-1]


def overwrite(tensor: Any) -> None:
    with torch.no_grad():
        tensor.zero_()  # written


def line(function: Callable[..., Any], mark: str) -> int:
    """The line of ``function`` that ends with ``# mark``."""
    lines, first = inspect.getsourcelines(function)
    [number] = [first + offset for offset, text in enumerate(lines) if text.rstrip().endswith(f"# {mark}")]
    return number


def passes(site: Site, function: Callable[..., Any], mark: str) -> bool:
    """Whether a stack passes the marked line of ``function``."""
    where = (inspect.getsourcefile(function), line(function, mark))
    return any((frame.file, frame.line) == where for frame in site.frames)


def only_conflict(recorder: Recorder) -> Conflict:
    assert recorder.core.log_errors == 0
    assert recorder.guard.blind_spots == {}
    [conflict] = recorder.conflicts
    return conflict


def fails(backward: Callable[[], Any]) -> str:
    """Run a backward that fails; what PyTorch said."""
    try:
        backward()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("this backward was to fail, and did not")
