"""PyTorch's own sentence for a stale saved tensor.

Saved-tensor hooks switch PyTorch's check off, so gradsan checks in its place and must raise what PyTorch would have
raised: the same type, a message that begins the same and says the same (saved_variable.cpp:197 in 2.13).
"""

from __future__ import annotations

from typing import Any

import torch

_START = "one of the variables needed for gradient computation has been modified by an inplace operation: "


def stale_message(tensor: Any, saved_version: int, producer: str | None) -> str:
    """The text of the RuntimeError. ``producer`` is the clause's ``output N of Op``, None where PyTorch has none."""
    sizes = str(list(tensor.shape))
    clause = f", which is {producer}," if producer else ""
    return (
        f"{_START}[{_type_name(tensor)} {sizes}]{clause} is at version {tensor._version}; "
        f"expected version {saved_version} instead. {_hint()}"
    )


def producer_clause(node: Any, slot: str | None) -> str | None:
    """``output N of Op`` for a saved result of ``node`` itself; None for operands, whose producer is not known here."""
    if node is None or slot is None or not slot.startswith("result"):
        return None
    digits = slot.removeprefix("result").partition("[")[0]
    return f"output {int(digits) if digits.isdigit() else 0} of {_operation(node)}"


def _operation(node: Any) -> str:
    name: str = node.name()
    # Since 2.13 the message names the forward operation (Node::forward_op_name), before that the Node.
    if torch.__version__ >= (2, 13):  # type: ignore[operator]
        head, found, tail = name.rpartition("Backward")
        return head if found and (not tail or tail.isdigit()) else name
    return name


def _type_name(tensor: Any) -> str:
    if tensor.is_complex() and tensor.layout is torch.strided:
        return f"{tensor.device.type.upper()}Complex{'Double' if tensor.dtype is torch.complex128 else 'Float'}Type"
    return str(tensor.type())


def _hint() -> str:
    if torch.is_anomaly_enabled():
        return (
            "Hint: the backtrace further above shows the operation that failed to compute its gradient. "
            "The variable in question was changed in there or anywhere later. Good luck!"
        )
    extra = ", check_nan=False" if torch.__version__ >= (2, 11) else ""  # type: ignore[operator]
    return (
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
        f"with torch.autograd.set_detect_anomaly(True{extra})."
    )
