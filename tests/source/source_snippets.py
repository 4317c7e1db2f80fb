"""Run a snippet from a real file and take the frames at which its operations really stood."""

from __future__ import annotations

import itertools
import linecache
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from gradsan.model import Frame

HAS_COLUMNS = sys.version_info >= (3, 11)


def frame_here(frame: FrameType) -> Frame:
    """The model's Frame of a running frame, with columns where this Python knows them."""
    code = frame.f_code
    file, line = code.co_filename, frame.f_lineno
    if HAS_COLUMNS:
        place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
        start_line, end_line, start, end = place
        if None not in place:
            first, last = (linecache.getline(file, number) for number in (start_line, end_line))
            column, end_column = (
                len(text.encode()[:offset].decode()) + 1 for text, offset in ((first, start), (last, end))
            )
            return Frame(file, start_line, code.co_name, column, end_line, end_column, is_user=True)
    return Frame(file, line, code.co_name, is_user=True)


def without_columns(frame: Frame) -> Frame:
    return replace(frame, column=None, end_line=None, end_column=None)


@dataclass
class Ran:
    """What happened: the operations in order, each with its frame, and the snippet's globals afterwards."""

    file: str
    text: str
    events: list[tuple[str, Frame]] = field(default_factory=list)
    names: dict[str, object] = field(default_factory=dict)

    def frame(self, op: str, index: int = 0) -> Frame:
        return [frame for name, frame in self.events if name == op][index]

    def note(self, op: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        if frame is not None:
            self.events.append((op, frame_here(frame)))


class Fake:
    """A stand-in for a tensor: every method gives a new stand-in, an in-place one itself, and all are noted."""

    def __init__(self, ran: Ran) -> None:
        object.__setattr__(self, "_ran", ran)

    def _do(self, op: str) -> Fake:
        self._ran.note(op)
        return self if op.endswith("_") else Fake(self._ran)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("data", "T", "grad", "h", "weight", "bias"):
            made = Fake(self._ran)
            object.__setattr__(self, name, made)
            return made
        return lambda *args, **kwargs: self._do(name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ran.note(name)
        object.__setattr__(self, name, value)

    def __call__(self, *args: object, **kwargs: object) -> Fake:
        return self._do("__call__")

    def __iter__(self):
        return iter((Fake(self._ran), Fake(self._ran)))

    def __getitem__(self, index: object) -> Fake:
        return self._do("__getitem__")

    def __setitem__(self, index: object, value: object) -> None:
        self._do("__setitem__")

    def __neg__(self) -> Fake:
        return self._do("__neg__")


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):

    def _inplace(self: Fake, other: object, op: str = f"__i{_name}__") -> Fake:
        self._do(op)
        return self

    def _plain(self: Fake, other: object, op: str = f"__{_name}__") -> Fake:
        return self._do(op)

    setattr(Fake, f"__i{_name}__", _inplace)
    setattr(Fake, f"__{_name}__", _plain)
    setattr(Fake, f"__r{_name}__", _plain)


def run_with_fakes(folder: Path, text: str, names: str = "x y z a b i j w h v f g adj buf grads") -> Ran:
    """Run ``text``, in which ``names`` are stand-ins, as a file of its own."""
    ran = _write(folder, text)
    scope: dict[str, object] = {name: Fake(ran) for name in names.split()}
    scope["__name__"] = "snippet"
    exec(compile(ran.text, ran.file, "exec"), scope)
    ran.names = scope
    return ran


def run_with_torch(folder: Path, text: str) -> Ran:
    """Run ``text``, which imports torch itself, as a file of its own, noting every function PyTorch dispatches."""
    import torch
    from torch.overrides import TorchFunctionMode

    ran = _write(folder, text)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            ran.note(getattr(function, "__name__", "?"))
            return function(*args, **(kwargs or {}))

    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "snippet"}
    with Watch():
        exec(compile(ran.text, ran.file, "exec"), scope)
    ran.names = scope
    return ran


def _write(folder: Path, text: str) -> Ran:
    number = len(list(folder.iterdir()))
    path = folder / f"snippet_{number}.py"
    text = textwrap.dedent(text).strip("\n") + "\n"
    path.write_text(text, encoding="utf-8")
    return Ran(str(path), text)
