"""Two phases of a round: what the second one takes from the first one's graph, cut off between them.

The usual shape: a world model is trained on what was observed, and the actor imagines on from its last states. The
states are a dict, or carried by loops on both sides, so that no single argument of a call can be detached.
"""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Frame, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes.graphs import detach_other_network
from gradsan.source.change import changed_lines
from gradsan.source.identifiers import bindings_of, consumed_names
from gradsan.source.locate import statement_at
from gradsan.source.modules import Shape, shape_in_source
from gradsan.source.rounds import detach_after

_SHARED = "forward_shared_by_two_backwards"


def cut_between(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """A line behind the step, detaching what the statement that made the shared tensor leaves to the later loss."""
    used = blocks.first(diagnosis, "used")
    updates = [one for one in diagnosis.labels if one.message.key == "label.updated_between"]
    if diagnosis.cause in blocks.STEPPED:
        updates = list(blocks.labels(diagnosis, "written"))
    pairs = [] if used is None else blocks.each_in_one_block(updates, used)
    if not pairs or diagnosis.cause not in (_SHARED, *blocks.STEPPED) or detach_other_network(diagnosis):
        return ()
    label, (step, backward) = max(zip(updates, pairs, strict=True), key=lambda one: one[1][0].index)
    frame = next((one for one in blocks.user_frames(label) if _is_at(one, step.statement)), None)
    if frame is None or step.index >= backward.index:
        return ()
    carried: dict[str, Shape] = {}
    for made in blocks.labels(diagnosis, "bridge", "saved"):
        carried |= {name: shape for name, shape in _left_by(made, step, backward).items() if name not in carried}
    change = detach_after(frame, carried)
    lines = () if change is None else changed_lines(step.source.file, change)
    return (blocks.fix("detach_other_network", lines, name=", ".join(carried)),) if lines else ()


def _is_at(frame: Frame, node: ast.stmt) -> bool:
    place = statement_at(frame)
    return place is not None and place.node is node


def _left_by(made: Label, step: blocks.Placed, backward: blocks.Placed) -> dict[str, Shape]:
    """What the statement of the block that ``made`` passes through computes and a statement behind the step reads."""
    index = blocks.at_block(made, step.block)
    if index is None or index >= step.index:
        return {}
    later = step.block[step.index + 1 : backward.index + 1]
    walked = blocks.names_read([node for node in step.block[index : step.index] if _runs_backward(node)])
    found: dict[str, Shape] = {}
    for node in ast.walk(step.block[index]):
        for one in bindings_of(node) if isinstance(node, ast.stmt) else ():
            if one.computed and one.replaces and one.name not in walked and _is_read(one.name, later):
                found.setdefault(one.name, shape_in_source(step.source, one) or "tensor")
    return found


def _is_read(name: str, nodes: list[ast.stmt]) -> bool:
    """Whether the first statement of ``nodes`` that has the name reads it, it or a part of it."""
    for node in nodes:
        inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt)]
        reads = {read for one in inner for read in consumed_names(one)}
        if any(read == name or read.startswith((f"{name}[", f"{name}.")) for read in reads):
            return True
        if any(one.name == name and one.replaces for part in inner for one in bindings_of(part)):
            return False
    return False


def _runs_backward(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))
