"""Clues to errors that name a Node, or that an earlier statement caused.

Roles: ``node`` (the call that made the Node; ``op`` its name; ``values``: ``needs``, which inputs of a custom Function
need a gradient), ``definition`` (where a custom Function's backward is defined), ``input`` (what a gradient was asked
for: ``name``; ``values``: ``rebased``, whether the graph of the loss leads to what it was before an in-place write;
``passed_by``, to what it was made of; ``others_reached``, to at least half of all that was asked for),
``rebased`` (that operation), ``loss`` (``values``: ``shape``, ``dtype``, ``device``).

Roles: ``overlapping_write`` (a logged write to a tensor with several elements at one place of memory: ``op``, and
``values`` with its ``shape`` and ``turn``, how many writes by the same line came before), ``detached`` (a logged
``detach_``), ``forward`` (the call that made the failing Node).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.errors.context import Context, of_node
from gradsan.graph import naming, walk
from gradsan.graph.live import tensor_of
from gradsan.model import Clue, Frame, Site
from gradsan.record.ledger import call_that_made
from gradsan.record.log import RawWrite, logged_writes
from gradsan.record.stacks import file_of, is_user_file, symbolise


def gather_node(context: Context) -> Iterator[Clue]:
    """Yield the Node that the message means, in the graph of the failed backward."""
    backward = context.backward
    if backward is None:
        return
    wanted = context.values.get("function", "")
    order = walk.engine_order(backward.roots, context.inputs, backward.via == "backward")
    if wanted:
        found = [node for node in order if type(node).__name__ == wanted or node.name() == wanted]
    elif context.row == "derivative_missing":
        op = context.values.get("op", "").replace("_", "").lower()
        found = [node for node in order if node.name().lower().startswith((f"{op}backward", "notimplemented"))]
    elif context.row == "differentiated_once_only":
        found = [node for node in order if node.name() in ("DelayedErrorNode", "Error", "DelayedError")]
    else:
        found = [node for node in order if hasattr(type(node), "_forward_cls")]
    for node in found[:1]:
        made = call_that_made(context.core, _torch.node_sequence(node), backward.thread)
        values = {"several": len(found) > 1, "needs": tuple(getattr(node, "needs_input_grad", ()))}
        yield Clue("node", None if made is None else symbolise(made.stack), op=node.name(), values=values)
        function = getattr(getattr(type(node), "_forward_cls", None), "backward", None)
        code = getattr(function, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            frame = Frame(file_of(code), _def_line(code), code.co_name, is_user=True)
            yield Clue("definition", Site((frame,)), name=wanted, op=node.name())


def _def_line(code: CodeType) -> int:
    """Return the line of ``def``, below the decorators."""
    text = source.source_lines(file_of(code))
    line: int = code.co_firstlineno
    while line <= len(text) and text[line - 1].lstrip().startswith("@"):
        line += 1
    return line


def gather_inputs(context: Context) -> Iterator[Clue]:
    """Yield the inputs that a gradient was asked for, and the writes that rebased them."""
    index = context.values.get("index")
    inputs = context.inputs
    chosen = [inputs[int(index)]] if index is not None and int(index) < len(inputs) else list(inputs)
    if context.row == "input_needs_no_gradient":
        chosen = [one for one in chosen if torch.is_tensor(one) and not one.requires_grad]
    reached = None if context.backward is None else set(walk.engine_order(context.backward.roots))
    for one in chosen[:3]:
        if not torch.is_tensor(one):
            continue
        before = reached is not None and one.grad_fn is not None and _older_in(one.grad_fn, reached)
        passed_by = reached is not None and _was_passed_by(one, reached)
        few = reached is not None and not passed_by and _mostly_reached(inputs, reached)
        values = {"rebased": before, "passed_by": passed_by, "others_reached": few}
        yield Clue("input", name=naming.name_of(one, context.frame), values=values)
        if before:
            storage = _torch.storage_identity(one)
            for write in reversed(logged_writes(context.core)):
                if write.storage == storage:
                    yield Clue("rebased", symbolise(write.stack), op=write.op)
                    break


def _mostly_reached(inputs: Sequence[Any], reached: set[Node]) -> bool:
    """Whether the loss was computed from at least half of the inputs."""
    leaves = {id(leaf) for leaf in walk.leaves_of(reached)}
    tensors = [one for one in inputs if torch.is_tensor(one)]
    found = [one for one in tensors if id(one) in leaves or (one.grad_fn is not None and one.grad_fn in reached)]
    return bool(found) and 2 * len(found) >= len(tensors)


def _was_passed_by(one: torch.Tensor, reached: set[Node]) -> bool:
    """Whether the loss was computed from what an input without effect was made of: it should have read the input."""
    if one.grad_fn is None or one.grad_fn in reached:
        return False
    used = {id(leaf) for leaf in walk.leaves_of(reached)}
    return any(id(leaf) in used for leaf in walk.leaves_of(walk.engine_order([one.grad_fn])))


def _older_in(node: Node, reached: set[Node]) -> bool:
    """Whether the Node of an in-place operation has an input Node in the loss's graph."""
    return node not in reached and any(child in reached for child, _ in node.next_functions if child is not None)


def gather_loss(context: Context) -> Iterator[Clue]:
    """Yield the tensor whose backward was called, or what ``autograd.grad`` was called with as ``differentiated``.

    Its values: ``outputs``, how many; ``is_summable`` where the one output has a number for each row of the inputs,
    which are no parameters; ``has_parameters``.
    """
    asked = (_torch.locals_of(one) for one in context.frames if one.f_code.co_name == "grad")
    yield from map(_differentiated, itertools.islice((one for one in asked if "outputs" in one), 1))
    own = context.site.user_frame
    name = None if own is None else source.method_receiver(own)
    tensor = None if name is None or context.frame is None else tensor_of(context.frame, name)
    if tensor is None:
        # A library calls backward for the program.
        entered = (_torch.locals_of(one) for one in context.frames if one.f_code.co_name == "backward")
        given = (one for frame in entered for one in _tensors(frame.get("tensors")) if one.numel() != 1)
        tensor, name = next(given, None), None
    if tensor is not None:
        yield Clue("loss", _made_at(context, tensor.grad_fn), name=name, values=_torch.facts_of(tensor))


_MOST_SCALED, _SCALES = 4, ("DivBackward", "MulBackward", "ToCopyBackward")
"""Operations of a library's between a loss of the program's and its backward: a division by the number of rounds."""


def _made_at(context: Context, node: Node | None) -> Site | None:
    """Where the program made the output of ``node``, or the loss that a library has only scaled."""
    for _ in range(_MOST_SCALED):
        made = None if node is None else call_that_made(context.core, _torch.node_sequence(node), threading.get_ident())
        site = None if made is None else symbolise(made.stack)
        if site is not None and all(one.file.startswith(_torch.package_folder()) for one in site.inner_frames):
            return site
        inputs = [one for one, _ in node.next_functions if one is not None] if node is not None else []
        if node is None or len(inputs) != 1 or not node.name().startswith(_SCALES):
            return None
        node = inputs[0]
    return None


def _differentiated(given: Mapping[str, Any]) -> Clue:
    outputs, inputs = (_tensors(given.get(one)) for one in ("outputs", "inputs"))
    rows = {len(one) if one.dim() else 0 for one in inputs}
    is_summable = len(outputs) == 1 and outputs[0].dim() > 0 and rows == {outputs[0].numel()} == {len(outputs[0])}
    has_parameters = any(isinstance(one, torch.nn.Parameter) for one in inputs)
    facts = {"outputs": len(outputs), "is_summable": is_summable and not has_parameters}
    return Clue("differentiated", None, values={**facts, "has_parameters": has_parameters})


def _tensors(given: Any) -> list[torch.Tensor]:
    return [one for one in (given if isinstance(given, list | tuple) else [given]) if torch.is_tensor(one)]


def gather_negative_slope(context: Context) -> tuple[Clue, ...]:
    """Return the call that made the failing Node; nothing for an error raised at the statement."""
    if context.backward is None or context.is_at_statement:
        return ()
    for node in walk.engine_order(context.backward.roots, context.inputs, context.backward.via == "backward"):
        slope = _torch.saved_number(node, "negative_slope")
        if slope is not None and slope < 0:
            clue = of_node(context.core, node, "forward")
            return () if clue is None else (clue,)
    return ()


def _writes_before(context: Context) -> list[RawWrite]:
    """Return the logged writes; none for an error raised at the statement."""
    return [] if context.is_at_statement else logged_writes(context.core)


def gather_detached(context: Context) -> tuple[Clue, ...]:
    """Return the last logged ``detach_``."""
    writes = _writes_before(context)
    return tuple(Clue("detached", symbolise(raw.stack), op=raw.op) for raw in writes if raw.op == "detach_")[-3:]


def gather_overlapping_writes(context: Context) -> tuple[Clue, ...]:
    """Return the last logged writes to tensors with several elements at one place."""
    overlapping = [raw for raw in _writes_before(context) if _overlaps_itself(raw)]
    stacks = [raw.stack for raw in overlapping]
    return tuple(
        Clue(
            "overlapping_write",
            symbolise(raw.stack),
            op=raw.op,
            values={"turn": stacks[:position].count(raw.stack), **_described(context, raw)},
        )
        for position, raw in enumerate(overlapping)
    )[-3:]


def _described(context: Context, raw: RawWrite) -> dict[str, object]:
    """Return the shape of the written tensor, and further facts if a live variable still holds it.

    A write read from the source has no known shape; its elements have size 0.
    """
    return {"shape": raw.shape, **_alive(context, raw)} if raw.itemsize else {}


def _alive(context: Context, raw: RawWrite) -> dict[str, str]:
    """Return further facts of the written tensor, if a live variable still holds it."""
    for found in naming.find(context.frame, lambda tensor: _torch.storage_identity(tensor) == raw.storage):
        tensor = found.tensor
        return {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return {}


def _overlaps_itself(raw: RawWrite) -> bool:
    """Whether an expanded dimension puts several elements at one place."""
    if raw.strides is None:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(raw.shape, raw.strides, strict=True))
