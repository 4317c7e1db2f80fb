"""Failure: an exception of autograd's other than the version check's, as plain data.

The way: :func:`of_exception` recognises the message in the catalogue, reads the stack off the traceback, and asks the
topic (:mod:`gradsan.errors.topics`) that serves the row. What comes out holds no tensor and no frame. An error of a
backward is looked at where it leaves the engine, when graph and variables are as they were; the Failure then waits on
the exception until it is known whether the program ends by it.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gradsan import _torch
from gradsan.catalogue import place_raised, recognise
from gradsan.errors import topics
from gradsan.model import Failure, Frame, Site
from gradsan.record.stacks import is_user_file, of_traceback
from gradsan.record.steps import BackwardRecord

_WAITING = "_gradsan_failure"
_TRACED = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class Context:
    """What a topic of clues may look at; it lives only while they are gathered.

    ``site`` is where the error was raised, ``frames`` the frames of that stack, innermost last, with their variables;
    ``frame`` is the one of the user frame (None where the stack has none). ``values`` are the groups of the row's
    pattern. ``backward`` is the call that failed, ``inputs`` the leaves it was asked for; None and empty for an error
    raised at the statement. ``backwards`` is the recorder's log of earlier backward calls.
    """

    core: Any
    steps: Any
    backwards: Any
    error: BaseException
    row: str
    values: dict[str, str]
    site: Site
    frames: tuple[FrameType, ...]
    frame: FrameType | None
    backward: BackwardRecord | None = None
    inputs: tuple[Any, ...] = ()

    @property
    def is_at_statement(self) -> bool:
        """Whether a line of the user's raised it, outside of any backward or in what a backward calls."""
        if self.backward is None or self.frame is None:
            return self.backward is None
        entries = [at for at, frame in enumerate(self.frames) if _torch.enters_engine(frame)]
        return not entries or any(frame is self.frame for frame in self.frames[entries[-1] + 1 :])


def of_exception(
    core: Any,
    steps: Any,
    error: BaseException,
    *,
    backwards: Any = None,
    backward: BackwardRecord | None = None,
    inputs: tuple[Any, ...] = (),
) -> Failure | None:
    """The Failure that ``error`` is; None for exceptions that the catalogue does not know."""
    waiting = kept_on(error)
    if waiting is not None:
        return waiting
    found = recognise([kind.__name__ for kind in type(error).__mro__], str(error), place_raised(error))
    if found is None:
        return None
    row, values = found
    site, frames, frame = of_traceback(error.__traceback__)
    compiled = _compiled_frames(str(error))
    if compiled:
        # The compiler ran the user's lines itself; the traceback ends at the call of the compiled function.
        site = Site((*_up_to_user(site), *compiled))
    context = Context(core, steps, backwards, error, row.slug, dict(values), site, frames, frame, backward, inputs)
    return Failure(
        row=row.slug,
        kind=type(error).__name__,
        message=str(error),
        site=site,
        clues=topics.gather(context),
        values=values,
    )


def _compiled_frames(message: str) -> tuple[Frame, ...]:
    """The lines that torch.compile names as those of the user's code it was tracing, outermost first."""
    _, found, traced = message.partition("from user code:")
    if not found:
        return ()
    return tuple(
        Frame(file, int(line), name, is_user=True) for file, line, name in _TRACED.findall(traced) if is_user_file(file)
    )


def _up_to_user(site: Site) -> tuple[Frame, ...]:
    """The frames of a stack down to the user frame."""
    last = max((index for index, frame in enumerate(site.frames) if frame.is_user), default=-1)
    return site.frames[: last + 1]


def kept_on(error: BaseException) -> Failure | None:
    """The Failure that waits on an exception, if one does."""
    waiting = getattr(error, _WAITING, None)
    return waiting if isinstance(waiting, Failure) else None


def keep_on(error: BaseException, failure: Failure) -> None:
    """Let ``failure`` wait on its exception; exceptions that take no attributes are looked at anew later."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _WAITING, failure)
