"""The tensor of a Node that shows none of its slots, by what PyTorch's message says of it."""

from __future__ import annotations

from typing import Any

from gradsan.capture import _torch, ledger, naming
from gradsan.capture.autopsy import Stale
from gradsan.model import Region, TensorInfo


def tensor_of(core: Any, stale: Stale, frame: Any) -> Any:
    """The tensor that fits, among those the user's frames from ``frame`` outwards hold; None unless they share memory.

    It has the sizes and the version of the message, and the log or a hidden Node's edges know of it.
    """

    def fits(tensor: Any) -> bool:
        return tuple(tensor.shape) == stale.sizes and tensor._version == stale.version

    written = {raw.storage for raw in _last_writes(core) if raw.version == stale.version}
    makers = {child for node in stale.hidden for child, _ in node.next_functions if child is not None}
    leaves = {id(getattr(maker, "variable", None)) for maker in makers}
    by_storage: dict[int, tuple[bool, bool, Any]] = {}
    for found in naming.find(frame, fits):
        tensor = found.tensor
        storage = _torch.storage_identity(tensor)
        is_operand = id(tensor) in leaves or tensor.grad_fn in makers
        known = by_storage.get(storage, (False, False, tensor))
        by_storage[storage] = (known[0] or storage in written, known[1] or is_operand, tensor)
    evidence = list(by_storage.values())
    # Both kinds of evidence beat one; what no write and no edge knows of is a coincidence of sizes.
    for best in (
        [tensor for logged, operand, tensor in evidence if logged and operand],
        [tensor for logged, operand, tensor in evidence if logged or operand],
    ):
        if best:
            return best[0] if len(best) == 1 else None
    return None


def last_write(core: Any, stale: Stale) -> ledger.RawWrite | None:
    """The last logged write that left its tensor with the sizes and version of the message."""
    for raw in _last_writes(core):
        if raw.version == stale.version and tuple(raw.shape) == stale.sizes and raw.strides is not None:
            return raw
    return None


def described(core: Any, stale: Stale) -> TensorInfo:
    """What is known of a tensor that nothing holds any more."""
    raw = last_write(core, stale)
    if raw is None:
        return TensorInfo(stale.sizes, "", "", 0, Region(0, stale.sizes, (), 1), True, False)
    region = Region(raw.offset, raw.shape, raw.strides or (), raw.itemsize)
    return TensorInfo(stale.sizes, "", "", raw.storage, region, True, False)


def _last_writes(core: Any) -> list[ledger.RawWrite]:
    """The last write to each storage, the latest first."""
    last: dict[int, ledger.RawWrite] = {}
    for entry in reversed(core.writes()):
        raw = ledger.RawWrite(*entry)
        last.setdefault(raw.storage, raw)
    return list(last.values())
