"""A save inside a compiled graph, seen from outside: torch.compile makes one operation of a function.

Which line of the function saved the value is not known; the line that called it is, and what its result is named.
"""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose.levels import place, user_frames
from gradsan.model import Save, Site

# The autograd Function that torch/_functorch/_aot_autograd makes of forward and backward of a graph.
_NODE = "CompiledFunctionBackward"
_ENTRY = "/torch/_dynamo/eval_frame.py"


def is_compiled(save: Save) -> bool:
    """Whether a compiled graph, not an operation of the program's, kept the value."""
    return save.node == _NODE


def from_outside(save: Save) -> Save:
    """``save`` at the call of the compiled function; as it is where no compiled graph saved.

    The frames below that call stand on the function's first line, whatever it does.
    """
    if not is_compiled(save):
        return save
    frames = save.site.frames
    entry = (at for at, frame in enumerate(frames) if frame.file.replace("\\", "/").endswith(_ENTRY))
    return replace(save, site=Site(frames[: next(entry, len(frames))]))


def called(save: Save) -> str | None:
    """What was called: ``model`` of ``out = model(x)``; None where the source does not tell."""
    frame = place(save.site)
    return None if frame is None else source.called_expression(frame)


def returned_as(save: Save) -> str | None:
    """What the result of the call is named: ``out`` of ``out = model(x)``; None where the source does not tell."""
    frames = user_frames(save.site)
    bound = source.bound_name(frames) if frames else None
    return None if bound is None else bound[0]
