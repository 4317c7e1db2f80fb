"""Files, lines and tensors as a reader in a given working directory sees them."""

from __future__ import annotations

import os
from pathlib import Path

from gradsan.model import Diagnosis, Frame, Gradient, Label, NamedTensor, Seen, Site
from gradsan.present._canvas import Canvas

_GRADSAN = Path(__file__).resolve().parent.parent


def working_directory(cwd: Path | None) -> Path | None:
    """Return ``cwd``, or the process's own; None where that has been deleted."""
    if cwd is not None:
        return cwd
    try:
        return Path.cwd()
    except OSError:
        return None


def shown_path(file: str, cwd: Path | None) -> str:
    """Return ``file`` relative to ``cwd`` where it lies below it, with forward slashes; as it is otherwise."""
    if cwd is None or not Path(file).is_absolute():
        return file
    for path, base in ((Path(file), cwd), (Path(os.path.realpath(file)), Path(os.path.realpath(cwd)))):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return file


def location(frame: Frame, cwd: Path | None) -> str:
    """Return ``file:line:column``, without the column where it is unknown."""
    place = f"{shown_path(frame.file, cwd)}:{frame.line}"
    return place if frame.column is None else f"{place}:{frame.column}"


def is_gradsan(frame: Frame) -> bool:
    """Whether the frame is gradsan's own code, which no report shows."""
    return Path(frame.file).is_absolute() and Path(frame.file).is_relative_to(_GRADSAN)


def shown_stack(site: Site) -> tuple[Frame, ...]:
    """Return the frames of the user and of libraries, outermost first."""
    return tuple(frame for frame in site.frames if not is_gradsan(frame))


def primary_label(diagnosis: Diagnosis) -> Label | None:
    """Return the label a diagnosis is about: the use, else the last write, else the last label."""
    for role in ("used", "written", "origin"):
        found = [label for label in diagnosis.labels if label.role == role]
        if found:
            return found[-1]
    return diagnosis.labels[-1] if diagnosis.labels else None


def describe_tensor(tensor: NamedTensor, canvas: Canvas) -> str:
    """Return name, type, shape, device and what kept the tensor, as far as they are worth telling."""
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    said = canvas.word("tensor_named", name=tensor.name, kind=kind) if tensor.name else kind
    if tensor.device != "cpu":
        said = canvas.word("tensor_on", tensor=said, device=tensor.device)
    if tensor.op and tensor.operand:
        return canvas.word("tensor_kept_as", tensor=said, op=tensor.op, operand=tensor.operand)
    if tensor.op:
        return canvas.word("tensor_kept", tensor=said, op=tensor.op)
    return said


def describe_gradient(gradient: Gradient, silent: bool, canvas: Canvas) -> str | None:
    """Return what became of the gradient; None where PyTorch raised and there is nothing to add."""
    if gradient.status == "wrong":
        if gradient.relative_error is not None:
            return canvas.word("gradient_wrong_by", error=gradient.relative_error)
        return canvas.word("gradient_wrong")
    if gradient.status == "right":
        return canvas.word("gradient_right")
    return canvas.word("gradient_silent") if silent else None


def describe_watched(seen: Seen, canvas: Canvas) -> str:
    """Return how many saves, writes, backwards and steps were seen, and in how many processes where it is not one."""
    counts = {"saves": seen.saves, "writes": seen.writes, "backwards": seen.backwards, "steps": seen.steps}
    counts |= {"processes": seen.processes} if seen.processes > 1 else {}
    return canvas.word("comma").join(canvas.word(name, count=count) for name, count in counts.items())
