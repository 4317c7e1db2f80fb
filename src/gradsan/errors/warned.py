"""Warnings of autograd's, looked at on their way to the program.

Whether a warning is shown, once or always, is decided by Python's filters before; only what is shown comes here, and
goes on as it is.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from gradsan.catalogue import recognise
from gradsan.errors.failures import Context
from gradsan.model import Failure
from gradsan.record.patches import Patches
from gradsan.record.stacks import is_own_file, is_user_file, symbolise


def watch(patches: Patches, look: Callable[[Warning | str, type[Warning]], None]) -> None:
    """Have ``look`` called with every warning that is shown."""
    original = warnings.showwarning

    @functools.wraps(original)
    def showwarning(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        look(message, category)
        original(message, category, *args, **kwargs)

    patches.set(warnings, "showwarning", showwarning)


def of_warning(recorder: Any, message: Any, category: type[Warning]) -> Failure | None:
    """The Failure that a warning of the catalogue is, with the clues of its row; None for all others."""
    from gradsan.errors import topics

    kinds = [kind.__name__ for kind in category.__mro__]
    found = recognise(kinds, str(message))
    if found is None:
        return None
    row, values = found
    core = recorder.core
    frame: Any = sys._getframe(1)
    frames: list[Any] = []
    while frame is not None and not _is_users(frame):
        frames.insert(0, frame)
        frame = frame.f_back
    site = symbolise(core.stack())
    backward = recorder.steps.current_backward()
    error = Warning(str(message))
    context = Context(
        core, recorder.steps, recorder.backwards, error, row.slug, dict(values), site, tuple(frames), frame, backward
    )
    return Failure(
        row=row.slug,
        kind=category.__name__,
        message=str(message),
        site=site,
        clues=topics.gather(context),
        values=values,
        raised=False,
    )


def _is_users(frame: Any) -> bool:
    file = frame.f_code.co_filename
    return is_user_file(file) and not is_own_file(file)
