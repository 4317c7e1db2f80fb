"""Saves inside a compiled graph, seen from outside: torch.compile makes one operation of a function.

The line of the function that saved the value is unknown; the line that called it is known, and its result's name.
"""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.model import Frame, Save, Site

# The autograd Function that torch/_functorch/_aot_autograd makes of forward and backward of a graph.
_NODE = "CompiledFunctionBackward"
_ENTRY = "/torch/_dynamo/eval_frame.py"


def is_compiled(save: Save) -> bool:
    """Whether a compiled graph, not an operation of the program's, saved the value."""
    return save.node == _NODE


def from_outside(save: Save) -> Save:
    """``save`` at the call of the compiled function; unchanged where no compiled graph saved.

    The frames below that call are at the function's first line, whatever it executes.
    """
    if not is_compiled(save):
        return save
    frames = save.site.frames
    entry = (at for at, frame in enumerate(frames) if frame.file.replace("\\", "/").endswith(_ENTRY))
    return replace(save, site=Site(frames[: next(entry, len(frames))]))


def is_written_inside(site: Site) -> bool:
    """Whether a compiled graph made the write at ``site``: its frames are below the program's own innermost one."""
    last = max((at for at, frame in enumerate(site.frames) if frame.is_user), default=-1)
    return last >= 0 and any(frame.file.replace("\\", "/").endswith(_ENTRY) for frame in site.frames[last + 1 :])


def written_from_outside(site: Site) -> Site:
    """The site of a write inside a compiled graph where that graph was called, or resumes after a graph break.

    The frame of a compiled function is at its first line, that of a resumed one at the line of the break.
    """
    if not is_written_inside(site):
        return site
    own = max(at for at, frame in enumerate(site.frames) if frame.is_user)
    if _is_resumed(site.frames[own]):
        return site
    entries = [at for at in range(own) if site.frames[at].file.replace("\\", "/").endswith(_ENTRY)]
    return Site(site.frames[: entries[-1]]) if entries else site


def goes_on_at(site: Site) -> bool:
    """Whether a site is in the resumed part of a compiled function, after a graph break."""
    frame = site.shown_frame
    return frame is not None and _is_resumed(frame)


def _is_resumed(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2].startswith("torch_dynamo_resume_in_")


def called(save: Save) -> str | None:
    """The callee: ``model`` of ``out = model(x)``; None where the source is ambiguous."""
    frame = save.site.shown_frame
    return None if frame is None else source.called_expression(frame)


def returned_as(save: Save) -> str | None:
    """The name of the call's result: ``out`` of ``out = model(x)``; None where the source is ambiguous."""
    frames = save.site.user_frames
    bound = source.bound_name(frames) if frames else None
    return None if bound is None else bound[0]
