"""Inputs of in-place layers that are read again as if unchanged: ``out = relu(x); ...; return out + x``.

Autograd records the write, so that gradients are those of the computation; but the value is another one.
Checked at the 1st, 2nd and 4th backward of a line: an in-place layer of torch's whose result several operations
use, one of them where the program reads the layer's argument by a name that was bound before the call, or out of a
list or a dict that held it when the layer wrote (checked at the second look): the features that a hook has kept. Where
the list was filled anew since, or has died, a read counts that found the value in containers alone, once in each.

Row: ``input_reused``. Roles: ``written`` (the call; ``name`` is the argument, ``op`` the in-place operation;
``values``: ``shape``, ``dtype``, ``device``), ``read`` (where it is read again; ``name`` is the name there).
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan._collector import objects_of
from gradsan.detect.changed_values import has_made
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import naming, walk
from gradsan.model import Clue, Frame, Site
from gradsan.record.detector import Finder, Run
from gradsan.record.ledger import call_that_made, site_that_made
from gradsan.record.log import RawStack, RawWrite
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, read_backward

ROW = "input_reused"
_ROUNDS = (1, 2, 4)
_STACKS, _KEEPERS, _READS, _UNNAMED, _LONGEST = 256, 16, 16, 8, 256
_GRAD_ENABLED = RawWrite._fields.index("grad_enabled")
_NODES_OF_A_CALL = 3
_NOT_NEGATIVE = frozenset(
    {"ReluBackward0", "SigmoidBackward0", "SoftmaxBackward0", "SoftplusBackward0", "ExpBackward0", "AbsBackward0"}
)
_KEEPS_SIGN = frozenset({"MaxPool2DWithIndicesBackward0", "AvgPool2DBackward0", "MeanBackward1", "ViewBackward0"})


class ReusedInputs(Finder):
    """Scans the graph of a backward for such reads; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._seen = self._notes(set[Hashable]())
        self._keepers = self._notes(dict[Hashable, set[int]]())
        """The containers that held what a call has written, by ``id``; empty before they were looked for."""
        self._kept = self._notes(dict[int, tuple[_torch.weak_tensor, RawStack]]())
        """What they held, by ``id``, and the call that has written it."""
        self._known = self._notes(set[int]())
        """Those of them that were in no other container when they were next read, as those of a later hook are."""
        self._unnamed = self._notes(set[int]())
        """Those whose lists were looked for among all objects."""
        self._reads = self._notes(dict[Hashable, dict[Hashable, str]]())
        """The reads of what a call has written, where only containers had it, and its path there."""

    def forget(self) -> None:
        super().forget()
        self._listeners.call_on_result(self._on_result, False)

    @_torch.hushed()
    def before_round(self, entry: RawBackward, rounds: int) -> None:
        if rounds not in _ROUNDS or len(self._seen) > _STACKS:
            return
        self._listeners.call_on_result(self._on_result, False)
        raws = list(self._written_by_layers())
        if not raws:
            return
        order = walk.engine_order(read_backward(entry).roots)
        by_number = {number: node for node in order if (number := _torch.node_sequence(node)) is not None}
        readers: dict[int, list[int]] = {}
        for number, node in by_number.items():
            for child, _ in node.next_functions:
                below = _torch.node_sequence(child)
                if below is not None:
                    readers.setdefault(below, []).append(number)
        looked_for, judged = set(self._keepers), set[Any]()
        self._kept.clear()
        self._known.clear()
        for raw in raws:
            number = None if raw.stack in self._seen else self._made_by(raw, entry.thread, by_number)
            if number is not None:
                judged.add(raw.stack)
                self._judge(entry, raw, by_number[number], [by_number[one] for one in readers.get(number, ())])
        # What a container may hold is looked for in the next round.
        self._seen |= {one for one in judged if one in looked_for or one not in self._keepers}
        self._listeners.call_on_result(self._on_result, not looked_for.issuperset(self._keepers))

    def _written_by_layers(self) -> Iterator[RawWrite]:
        folder = _torch.package_folder()
        for item in self._core.writes():
            if not item[_GRAD_ENABLED]:
                continue  # most of a long log
            raw = RawWrite._make(item)
            is_new = raw.stack not in self._seen and not raw.is_parameter
            is_layer = bool(raw.stack.codes) and raw.stack.codes[0].co_filename.startswith(folder)
            if is_new and is_layer and raw.version and raw.op.endswith("_"):
                yield raw

    def _made_by(self, raw: RawWrite, thread: int, by_number: dict[int, Any]) -> int | None:
        """Return the number of the Node that the writing call has made, if it is in the graph.

        It is the last one before the call's log entry, or before the copies that it has saved (``silu_``).
        """
        near = range(raw.sequence - 1, raw.sequence - _NODES_OF_A_CALL - 1, -1)
        number = next((one for one in near if one in by_number), None)
        if number is None:
            return None  # of another graph; searching the log for each such write would take too long
        made = call_that_made(self._core, raw.sequence - 1, thread)
        return number if made is not None and number >= made.first and has_made(made, raw, self._core) else None

    def _judge(self, entry: RawBackward, raw: RawWrite, node: Node, readers: list[Any]) -> None:
        before = node.next_functions[0][0] if node.next_functions else None
        # The same operation again changes nothing: that is what the layer is for.
        readers = [one for one in readers if one.name() != node.name()]
        if before is None or len(readers) < 2 or (node.name() == "ReluBackward0" and _is_not_negative(before)):
            return
        written, made = symbolise(raw.stack), site_that_made(self._core, before, entry.thread)
        for reader in readers:
            read = site_that_made(self._core, reader, entry.thread)
            found = None if read is None else _read_as_before(written, made, read)
            if found is None or read is None:
                continue
            named, name, call, place = found
            written, read = at_line(written, call, call.line), at_line(read, place, place.line)
            self._tell(entry, raw, node, Clue("written", written, named), Clue("read", read, name))
            return
        if self._keepers.setdefault(raw.stack, set()):
            self._judge_kept(entry, raw, node, readers, written)

    def _on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for one in args if self._kept else ():
            kept = self._kept.get(id(one))
            if kept is not None and kept[0]() is one is not result:
                self._note_read(kept[1], one)
        stack = self._core.stack(2) if op.endswith("_") else None
        keepers = self._keepers.get(stack) if stack is not None else None
        if stack is not None and keepers is not None and len(keepers) < _KEEPERS:
            found = naming.find(sys._getframe(1), lambda one: one is result)
            held = {id(one.around[-1][1]) for one in found if one.container in naming.COLLECTING}
            keepers.update(held)
            if held:
                self._kept[id(result)] = _torch.weak_tensor(result), stack

    def _note_read(self, written: RawStack, tensor: Any) -> None:
        """Note a read of what a container held when the layer wrote, if no variable has it.

        A container that has it twice, or another one that has it soon, may have got it from after the layer.
        """
        reads, stack = self._reads.setdefault(written, {}), self._core.stack(3)
        is_first = id(tensor) not in self._known
        if not is_first and (stack in reads or len(reads) >= _READS):
            return
        found = list(naming.find(sys._getframe(2), lambda one: one is tensor))
        held = [one for one in found if one.around and one.container in naming.COLLECTING]
        holders = [id(one.around[-1][1]) for one in held]
        if not found or held or len(self._unnamed) >= _UNNAMED:
            named = held[0].path if held else ""
        else:
            # ``for a, b in zip(features(fake), features(real))``: no variable leads to the lists.
            holders, named = _lists_with(tensor), found[0].path
            self._unnamed.add(id(tensor))
        is_once = len(holders) == len(set(holders)) > 0
        if is_first and not (is_once and self._keepers[written].issuperset(holders)):
            del self._kept[id(tensor)]
            return
        self._known.add(id(tensor))
        others, frame = [one.path for one in found if one not in held], symbolise(stack).user_frame
        # ``for a, b in zip(of_fake, of_real)`` has it from the list.
        is_walked = frame is not None and all(source.is_walked_over(frame, one) for one in others)
        reads[stack] = named if is_once and is_walked else ""

    def _judge_kept(self, entry: RawBackward, raw: RawWrite, node: Node, readers: list[Any], written: Site) -> None:
        """Report a value that is read out of a container that held it when the layer wrote."""
        keepers, number = self._keepers[raw.stack], _torch.node_sequence(node)
        held = [
            one
            for one in naming.find(sys._getframe(2), naming.has_graph)
            if one.around and id(one.around[-1][1]) in keepers and _torch.node_sequence(one.tensor.grad_fn) == number
        ]
        reads = {symbolise(at).user_frame: path for at, path in self._reads.get(raw.stack, {}).items() if path}
        for reader in readers if held or reads else ():
            read = site_that_made(self._core, reader, entry.thread) or Site()
            around = {(one.file, one.line, one.function) for one in written.frames}
            for frame in read.user_frames:
                one = next((one for one in held if source.reads_from(frame, one.within or "")), None)
                path = reads.get(frame) if one is None else one.path
                if path and (frame.file, frame.line, frame.function) not in around:
                    call = written.user_frames[-1]
                    written, read = at_line(written, call, call.line), at_line(read, frame, frame.line)
                    self._tell(entry, raw, node, Clue("written", written, path), Clue("read", read, path))
                    return

    def _tell(self, entry: RawBackward, raw: RawWrite, node: Node, written: Clue, read: Clue) -> None:
        shape, dtype, device = _torch.output_info(node, 0) or ((), "?", "?")
        values = {"shape": shape, "dtype": dtype, "device": device}
        self._report_at(ROW, entry.stack, replace(written, op=raw.op, values=values), read)
        self._seen.add(raw.stack)


def _lists_with(tensor: Any) -> list[int]:
    """All short lists that have a tensor, by ``id``, each as often as it has it."""
    lists = (one for one in objects_of({list}) if len(one) <= _LONGEST)
    return [id(one) for one in lists for item in one if item is tensor]


def _read_as_before(written: Site, made: Site | None, read: Site) -> tuple[str, str, Frame, Frame] | None:
    """The argument, the name by which it is read again, and both places; in the function that called the layer, or
    in one that passed it on.
    """
    frames = written.frames
    position = max((at for at, frame in enumerate(frames) if frame.is_user), default=None)
    named = None if position is None else source.first_argument(frames[position])
    while named is not None and position is not None:
        call = frames[position]
        # A value computed within the call is not the call's argument.
        if made is not None and made.frames[: position + 1] == frames[: position + 1]:
            return None
        around = [(frame.file, frame.function) for frame in frames[: position + 1]]
        if len(read.frames) > position and around == [
            (frame.file, frame.function) for frame in read.frames[: position + 1]
        ]:
            name = source.read_as_before(named, call, read.frames[position])
            if name is not None:
                return named, name, call, read.frames[position]
        outer = max((at for at, frame in enumerate(frames[:position]) if frame.is_user), default=None)
        if outer is None:
            return None
        named = source.callers_expression(named, call, frames[outer], frames[outer + 1 : position])
        position = outer
    return None


def _is_not_negative(node: Node | None) -> bool:
    for _ in range(4):
        if node is None or node.name() in _NOT_NEGATIVE:
            return node is not None
        if node.name() not in _KEEPS_SIGN:
            return False
        node = node.next_functions[0][0]
    return False
