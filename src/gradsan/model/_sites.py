"""Sites, tensors and sentences as plain data: the building blocks of all events and findings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence by its key in ``gradsan/text/<language>/*.toml`` and the values that fill it.

    Words live in the text package only; a Message becomes a ``str`` when a presenter asks for it in a language.
    A value may itself be a Message.
    """

    key: str
    values: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the sentence, in the language of the environment."""
        from gradsan.text import choose_language, say

        return say(self, choose_language("auto", os.environ))


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack.

    ``file`` is absolute (or ``<string>``-like); ``line`` and ``end_line`` count from 1; ``column`` and
    ``end_column`` count characters from 1, the end being exclusive, and are None where Python does not know them.
    ``is_user`` tells the user's own code from the standard library, installed packages and gradsan itself.
    """

    file: str
    line: int
    function: str
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    is_user: bool = False


def package_path(frame: Frame) -> tuple[str, ...]:
    """The parts of a frame's file below the folder of installed packages; empty elsewhere."""
    parts = Path(frame.file).parts
    index = max((parts.index(folder) for folder in _PACKAGES if folder in parts), default=None)
    return () if index is None else parts[index + 1 :]


@dataclass(frozen=True, slots=True)
class Site:
    """A stack of frames, outermost first."""

    frames: tuple[Frame, ...] = ()

    @property
    def user_frame(self) -> Frame | None:
        """The deepest frame of the user's own code; None where the stack has none."""
        return next((frame for frame in reversed(self.frames) if frame.is_user), None)

    @property
    def user_frames(self) -> tuple[Frame, ...]:
        """The frames of the user's own code, outermost first."""
        return tuple(frame for frame in self.frames if frame.is_user)

    @property
    def inner_frames(self) -> tuple[Frame, ...]:
        """The frames below the user frame, outermost first."""
        last = max((index for index, frame in enumerate(self.frames) if frame.is_user), default=len(self.frames))
        return self.frames[last + 1 :]

    @property
    def library_frame(self) -> Frame | None:
        """The innermost of these in an installed package other than torch; None without one."""
        inner = reversed(self.inner_frames)
        return next((frame for frame in inner if package_path(frame)[:1] not in ((), ("torch",))), None)

    @property
    def shown_frame(self) -> Frame | None:
        """The user frame, else the innermost one; None where the stack has none."""
        return self.user_frame or (self.frames[-1] if self.frames else None)


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a storage that a tensor covers: a strided box, in elements of ``itemsize`` bytes.

    ``index`` narrows the box to the part that a basic ``tensor[index] = value`` wrote (a tuple of ``int``, ``slice``,
    ``None`` and ``...``); it is None where the whole box was written or the index was a tensor.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    index: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Metadata of a tensor, without the tensor. ``storage`` identifies its memory within one run."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    storage: int
    region: Region
    requires_grad: bool = False
    is_leaf: bool = True
