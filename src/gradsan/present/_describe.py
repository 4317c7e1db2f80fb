"""A tensor, what became of its gradient, and how much was watched, in words."""

from __future__ import annotations

from gradsan.model import Gradient, NamedTensor, Seen
from gradsan.present._canvas import Canvas


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
