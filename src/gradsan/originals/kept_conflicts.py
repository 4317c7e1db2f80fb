"""Conflict of a saved value whose original differs from the value that backward would read, as plain data."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.graph.conflicts import bridge_over, moment_of, passed, save_of, tensor_info, use_of
from gradsan.graph.stale_slots import Origin
from gradsan.model import Conflict, Deviation, Site, Write
from gradsan.originals.originals import Kept
from gradsan.record import ledger
from gradsan.record.log import Log
from gradsan.record.steps import BackwardRecord, StepLog


class PastCounter(NamedTuple):
    """How memory was written past the version counter (``kind``: the slug of a GS2xx cause), and where it began.

    ``write`` stands for the writes where nothing could log them.
    """

    kind: str
    site: Site
    write: Write | None = None


def of_kept(
    core: Log,
    steps: StepLog,
    kept: Kept,
    *,
    counted: bool,
    raised: bool,
    changed: bool,
    deviation: Deviation | None,
    healed: int | None,
    bypass: PastCounter | None,
    node: Node | None = None,
) -> Conflict:
    """Return the conflict of a value that backward asks for now, or that ``node`` keeps for a backward.

    ``counted``: its version counter moved. ``raised``: it makes backward fail. ``changed``: a byte of it differs; where
    none does, the writes changed other bytes, or wrote the same values. ``deviation`` and ``healed`` as in the
    Conflict; ``bypass`` is how the counter was passed, where that was seen.
    """
    frame = sys._getframe(1)
    node = _torch.current_node() if node is None else node
    slot = _torch.slot_of(node, kept)
    backward = steps.current_backward()
    info = tensor_info(kept.alias, was_leaf=kept.was_leaf)
    info = replace(info, requires_grad=kept.requires_grad or not kept.was_leaf)
    version = 0 if kept.alias.is_inference() else int(kept.alias._version)
    if counted:
        writes = ledger.writes_since(core, steps, info.storage, kept.clock, kept.version, version)
    else:
        written = kept.changed_part or kept
        storage = info.storage if written is kept else _torch.storage_identity(written.alias)
        writes = ledger.uncounted_since(core, steps, storage, kept.clock, kept.stack)
        if not writes and bypass is not None and bypass.write is not None:
            writes = (bypass.write,)
    made = Origin(kept.clock, kept.stack, kept.thread, True)
    conflict = Conflict(
        save=save_of(core, steps, kept.clock, kept.stack, info, kept.version, node, slot),
        writes=writes,
        use=use_of(core, backward, version),
        # Where .data was given other memory, the program holds the tensor that backward would read now.
        names=naming.names_of(kept.alias, frame) or naming.names_of(kept.current, frame),
        unexplained=ledger.unexplained_moves(writes, kept.version, version),
        root_sequence=backward.root_sequence if backward else None,
        bridge=bridge_over(core, backward, node, made, writes, frame) if backward and counted else None,
        raised=raised,
        log_was_cut=core.lost_writes_after(kept.clock),
        passed=passed(core, backward.roots, node, moment_of(writes)) if backward else (),
        bypass=None if counted else bypass.kind if bypass else _bypass(kept, writes, node),
        alias_site=None if counted or bypass is None else bypass.site,
        change=kept.change() if changed else None,
        deviation=deviation,
        healed_bytes=healed,
        unchanged=not changed,
    )
    from gradsan.graph import compiled

    return conflict if backward is None else compiled.as_uncompiled(conflict, node, slot, kept.alias, backward)


def changed_beside(backward: BackwardRecord | None, kept: Kept) -> tuple[Any, Kept] | None:
    """Return a Node of ``backward`` that saved a changed value in the same memory as ``kept``, and that value.

    PyTorch stops at the first value whose counter moved, even if only its neighbour was written.
    """
    if backward is None:
        return None
    storage = _torch.storage_identity(kept.alias)
    for node in walk.engine_order(backward.roots):
        for _, saved in _torch.saved_slots(node):
            other = _torch.packed_object(saved)
            if not isinstance(other, Kept) or other is kept or not other.moved:
                continue
            if _torch.storage_identity(other.alias) == storage and other.changed:
                return node, other
    return None


def _bypass(kept: Kept, writes: tuple[Write, ...], node: Node) -> str | None:
    """Return how a write passed PyTorch's counter, as far as the log shows it."""
    # Inductor saves views that it makes itself, whose counter is their own.
    is_counted = any(write.version is not None for write in writes)
    if is_counted and node is not None and _torch.is_compiled_node(node):
        return "compiled_input"
    if any(write.kind == "step" for write in writes):
        return "fused_optimizer"
    # No use of ``.data`` was seen: known is only that the writer has a counter of its own.
    if kept.parts or writes:
        return "storage_alias"
    return "memory_alias" if kept.is_copied else None
