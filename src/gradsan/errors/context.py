"""Context of an error: the state that a topic of clues may read while they are collected."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType
from typing import Any

from gradsan import _torch
from gradsan.model import Site
from gradsan.record.log import Log
from gradsan.record.steps import BackwardRecord


@dataclass(frozen=True, slots=True)
class Context:
    """The state that a topic of clues may read; it lives only while they are collected.

    ``site`` is where the error was raised, ``frames`` the frames of that stack, innermost last, with their variables;
    ``frame`` is the one of the user frame (None where the stack has none). ``values`` are the groups of the row's
    pattern. ``backward`` is the call that failed, ``inputs`` the leaves it was asked for; None and empty for an error
    raised at the statement. ``backwards`` is the recorder's log of earlier backward calls.
    """

    core: Log
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
        """Whether a line of the user's raised it, outside of any backward or in code called by one."""
        if self.backward is None or self.frame is None:
            return self.backward is None
        entries = [at for at, frame in enumerate(self.frames) if _torch.enters_engine(frame)]
        return not entries or any(frame is self.frame for frame in self.frames[entries[-1] + 1 :])
