"""Evidence that a leaf of a training was left out by mistake, of the kinds that ``unowned.py`` lists."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from gradsan import _torch, source
from gradsan.detect.changed_values import read_of, storage_of
from gradsan.detect.meaning.made import Made, Making
from gradsan.detect.meaning.terms.constant_terms import sums_below
from gradsan.detect.meaning.terms.cut_terms import Cut
from gradsan.graph import naming, walk
from gradsan.model import Frame
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Log, RawStack
from gradsan.record.stacks import is_user_file, symbolise
from gradsan.record.steps import RawBackward, read_backward

_PART = 1 / 3
_FREEZES = frozenset({"no_grad", "detached"})
_WITHOUT_GRAPH = frozenset({"no_grad", "inference_mode"})
_PRODUCT, _TAKES = re.compile("(Mm|Addmm|Bmm|Baddbmm)Backward"), re.compile("Index(Select)?Backward")
_MODULE_OWN = frozenset(vars(nn.Module()))


class Evidence:
    """Evidence that a leaf was left out by mistake, in one graph with one set of trained parameters."""

    def __init__(
        self,
        core: Log,
        making: Making,
        owned: set[int],
        order: list[Node],
        entry: RawBackward,
        was_frozen: Callable[[Any, int], bool],
    ) -> None:
        """Take ``order``, the Nodes of the backward ``entry``, and ``owned``, the parameters of optimizers by ``id``.

        ``was_frozen`` tells whether a leaf was seen with ``requires_grad=False`` after some clock.
        """
        self._core, self._making, self._owned, self._order = core, making, owned, order
        self._roots = read_backward(entry).roots
        self._stack, self._thread, self._was_frozen = entry.stack, entry.thread, was_frozen
        self._tops = top_modules()
        self._leads = self._leading()

    def of(self, leaf: Any) -> str | None:
        """Return the kind of evidence for a leaf, or None."""
        run_out = self._making.run_out
        if run_out is not None and run_out.weak() is not None:
            return "run_out"
        if self._making.remade(leaf) is not None:
            return None if _reads_gradients(self._stack) else "remade"
        top = next((one for one in self._tops if any(held is leaf for held in one.parameters())), None)
        others = [] if top is None else [one for one in top.parameters() if one.requires_grad]
        has_owned = any(id(one) in self._owned for one in others)
        hidden = self._hidden(leaf, None if has_owned else top)
        if hidden is not None:
            return hidden
        if has_owned and top is not None:
            rest = [one for one in others if id(one) not in self._owned]
            made = max((one.clock for one in self._owners(others)), default=None)
            if made is not None and all(self._making.is_late(one, made) for one in rest):
                return "late"
            if made is not None and self._was_frozen(leaf, made):
                return None if _reads_gradients(self._stack) else "unfrozen"
            size, whole = sum(one.numel() for one in rest), sum(one.numel() for one in others)
            is_part = size < _PART * whole and self._is_left_whole(top, leaf)
            if not is_part or self._meeting(leaf) is None:
                return None
            if not self._feeds_trained(leaf):
                return "left_out_end"
            return "left_out_chosen" if self._are_chosen(others) else "left_out"
        frozen = [] if top is None else [one for one in top.parameters() if id(one) in self._owned]
        made = max((one.clock for one in self._owners(frozen)), default=None)
        if made is not None and all(self._making.is_late(one, made) for one in others):
            return "late_frozen"
        found = self._meeting(leaf)
        if found is None:
            return None
        node, own, joined = found
        if top is None:
            is_data = not self._are_computed(joined) or _is_one_by_one(leaf, own, joined) or _is_of_a_library(leaf)
            return None if is_data or _reads_gradients(self._stack) else "alone"
        is_own = any(held is leaf for held in top.parameters(recurse=False))
        is_whole = top.training and not type(top).__module__.startswith("torch.")
        if is_own and is_whole and self._is_within(node, top):
            return "criterion"
        is_term = top.training and _torch.node_sequence(node) in set(sums_below(self._roots)) and _is_one_number(node)
        if not is_term or _reads_gradients(self._stack):
            return None
        return "own_term_cut" if self._reads_trained(own) else "own_term"

    def is_parameter(self, leaf: Any, value: Node) -> bool:
        """Whether a leaf is meant as a parameter, of which only ``value``, computed before training, is kept.

        What a layer has made of data, or several leaves together, is a feature; a buffer is no parameter. A tensor
        that is told to require a gradient may be data: it counts where data is multiplied by it, where more is taken
        from it than it has, or where it meets results of trained parts that have no row for each of its rows.
        """
        made = list(walk.each_behind([value]))
        is_of_layer = any(map(_is_applied, made)) or len(walk.leaves_of(made)) != 1
        if is_of_layer or any(_torch.grad_fn_of(one) is value for one in _buffers()):
            return False
        if type(leaf) is nn.Parameter:
            return True
        found = self._meeting(leaf)
        if found is None:
            return False
        _, own, joined = found
        if any(_is_applied(one) or _enlarges(one) for one in walk.each_behind(own)):
            return True
        return self._are_computed(joined) and not _is_one_by_one(leaf, own, joined)

    def name_of(self, leaf: torch.Tensor) -> str | None:
        """Return the leaf's name, with the class of the module that has it; None where none has."""
        named = ((top, name) for top in self._tops for name, held in top.named_parameters() if held is leaf)
        return next((f"{type(top).__name__}.{name}" for top, name in named), None)

    def _owners(self, parameters: list[Any]) -> Iterator[Made]:
        """Yield the optimizers with some of ``parameters``."""
        wanted = {id(one) for one in parameters}
        for optimizer, made in self._making.optimizers():
            if any(id(one) in wanted for one in _torch.parameters_of(optimizer)):
                yield made

    def _is_left_whole(self, top: nn.Module, leaf: torch.Tensor) -> bool:
        owner = next(
            (one for one in top.modules() if any(held is leaf for held in one.parameters(recurse=False))), None
        )
        if owner is None or not owner.training:
            return False
        own = list(owner.parameters(recurse=False))
        # Normalising layers, and others that only scale and shift, are often frozen on purpose.
        only_scales = all(one.dim() < 2 for one in own)
        return not only_scales and not any(id(one) in self._owned for one in own)

    def _hidden(self, leaf: torch.Tensor, top: nn.Module | None) -> str | None:
        """Evidence where a module of a fully trained model holds the leaf, or its module, in a plain attribute."""
        for model in self._tops:
            held = [one for one in model.parameters() if one.requires_grad]
            if model is top or not held or not all(id(one) in self._owned for one in held):
                continue
            for module in model.modules():
                for value in (value for key, value in vars(module).items() if key not in _MODULE_OWN):
                    inside = list(_inside([value]))
                    if any(one is leaf for one in inside):
                        return None if _reads_gradients(self._stack) else "unregistered"
                    modules = [one for one in inside if isinstance(one, nn.Module) and one.training]
                    # A module that is such an attribute itself was stored past ``__setattr__`` on purpose.
                    is_put = any(one is value for one in modules)
                    if is_put or not any(own is leaf for one in modules for own in one.parameters()):
                        continue
                    is_alone = len(inside) == 1 and not isinstance(value, dict)
                    return "unregistered_one" if is_alone and not self._feeds_trained(leaf) else "unregistered"
        return None

    def _are_chosen(self, parameters: list[Any]) -> bool:
        """Whether the program selects by name or number the parameters for the optimizers of ``parameters``."""
        frames = (frame for made in self._owners(parameters) for frame in symbolise(made.stack).user_frames)
        return any(map(source.chooses_parameters, frames))

    def _are_computed(self, nodes: list[Node]) -> bool:
        """Whether trained parts or data have computed all of this: none is a parameter, or a view of one."""
        return not any(id(getattr(_origin(one), "variable", None)) in self._owned for one in nodes)

    def _is_within(self, node: Node, module: nn.Module) -> bool:
        """Whether a method of a module's own class has made a Node."""
        own = (inspect.unwrap(one) for one in vars(type(module)).values() if callable(one))
        codes = {code for one in own if (code := getattr(one, "__code__", None)) is not None}
        made = call_that_made(self._core, _torch.node_sequence(node), self._thread)
        return made is not None and not codes.isdisjoint(made.stack.codes)

    def _reads_trained(self, own: list[Any]) -> bool:
        """Whether what leads to no trained part reads what trained parts have computed, or read: it was detached."""
        seen = set[int]()
        for node in self._leads:
            for slot, saved in _torch.saved_slots(node):
                read = read_of(node, 0, slot, saved)
                if slot.startswith("result") or (read is not None and read.maker is not None):
                    seen.add(storage_of(saved))
        behind = walk.each_behind(own)
        return any(storage_of(saved) in seen - {0} for node in behind for _, saved in _torch.saved_slots(node))

    def _leading(self) -> set[Any]:
        """Return the Nodes that lead to a trained parameter."""
        found: set[Any] = set()
        for node in reversed(self._order):
            for child, _ in node.next_functions:
                if child is not None and (child in found or id(getattr(child, "variable", None)) in self._owned):
                    found.add(node)
                    break
        return found

    def _meeting(self, leaf: torch.Tensor) -> tuple[Any, list[Any], list[Any]] | None:
        """Return the operation that combines the leaf, or values computed from it alone, with results of trained parts.

        With its inputs that come from the leaf, and the other ones; None where there is none.
        """
        alone: set[Any] = set()
        for node in reversed(self._order):
            children = _children(node)
            own = [one for one in children if one in alone or getattr(one, "variable", None) is leaf]
            if own:
                rest = [one for one in children if one not in own]
                if str(node.name()).startswith("CompiledFunction"):
                    return None
                if any(one in self._leads or id(getattr(one, "variable", None)) in self._owned for one in rest):
                    meets = any(one in self._leads for one in rest) or _is_value(rest, self._owned)
                    return (node, own, rest) if meets else None
                alone.add(node)
        return None

    def _feeds_trained(self, leaf: torch.Tensor) -> bool:
        """Whether an operation applies a trained parameter to values computed from the leaf."""
        behind: set[Node] = set()
        trained: set[Any] = set()
        for node in reversed(self._order):
            children = _children(node)
            own = [one for one in children if id(getattr(one, "variable", None)) in self._owned or one in trained]
            if len(children) == 1 and own:
                trained.add(node)
            elif any(one in behind for one in children):
                if own:
                    return True
                behind.add(node)
            elif len(children) > 1 and any(self._is_of(one, leaf) for one in children):
                behind.add(node)
        return False

    @staticmethod
    def _is_of(node: Node, leaf: torch.Tensor) -> bool:
        """Whether a Node is that of the leaf, or a chain from it alone, such as the transpose in a linear layer."""
        while len(children := _children(node)) == 1:
            node = children[0]
        return getattr(node, "variable", None) is leaf


def _is_one_number(node: Node) -> bool:
    """Whether a Node has made one element."""
    info = _torch.output_info(node, 0)
    return info is not None and math.prod(info[0]) == 1


def _is_applied(node: Node) -> bool:
    """Whether a Node multiplies data, which has no graph, by a weight: data comes first."""
    edges = [child for child, _ in node.next_functions]
    if node.name().startswith("Convolution"):
        return edges[0] is None
    if node.name().startswith("Embedding"):
        return True
    return _PRODUCT.match(node.name()) is not None and edges[-2:-1] == [None] and edges[-1] is not None


def _enlarges(node: Node) -> bool:
    """Whether a Node takes more elements from a value than it has: rows of a table, again and again."""
    inner = _children(node)
    is_taken = _TAKES.match(node.name()) is not None and len(inner) == 1
    return is_taken and math.prod(_shape_of(node)) > math.prod(_shape_of(inner[0]))


def _buffers() -> Iterator[Any]:
    """Yield the buffers of live modules."""
    for module in naming.all_modules_alive():
        yield from (one for one in vars(module).get("_buffers", {}).values() if torch.is_tensor(one))


def top_modules() -> list[nn.Module]:
    """Return the live modules that are no part of others."""
    modules = [one for one in naming.all_modules_alive() if _is_complete(one)]
    inner = {id(child) for one in modules for child in one.children()}
    return [one for one in modules if id(one) not in inner]


def _is_of_a_library(leaf: torch.Tensor) -> bool:
    """Whether a module of an installed package holds a leaf as a buffer or in an attribute, for its own use."""
    for module in naming.all_modules_alive():
        file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
        is_own = file is None or is_user_file(file) or type(module).__module__.startswith("torch.")
        if not is_own and any(one is leaf for one in _inside(vars(module).values())):
            return True
    return False


def _is_complete(module: nn.Module) -> bool:
    """Whether a module's constructor has got so far that its children and parameters can be listed."""
    try:
        return all(True for _ in itertools.chain(module.children(), module.parameters(recurse=False)))
    except AttributeError:
        return False


def _children(node: Node) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _origin(node: Node) -> Any:
    """Return the Node below those that only make views."""
    while _torch.makes_view(node) and len(children := _children(node)) == 1:
        node = children[0]
    return node


def _is_one_by_one(leaf: torch.Tensor, own: list[Any], rest: list[Any]) -> bool:
    """Whether a leaf has an element, or a row, for each of those that it is combined with."""
    shapes = [_shape_of(one) for one in rest]
    mine = [_shape_of(one) for one in own]
    return any(
        len(shape) > 1 and len(shape) == len(other) and shape[0] == other[0] > 1 and leaf.numel() >= math.prod(shape)
        for shape in mine
        for other in shapes
    )


def _shape_of(node: Node) -> tuple[int, ...]:
    held = getattr(node, "variable", None)
    info = None if held is not None else _torch.output_info(node, 0)
    return tuple(held.shape) if held is not None else tuple(info[0]) if info is not None else ()


def _is_value(nodes: Iterable[Node], owned: set[int]) -> bool:
    """Whether a leaf is combined with a trained parameter itself: not as the bias of a layer of its own."""
    return all(id(getattr(one, "variable", None)) in owned for one in nodes)


def _inside(values: Iterable[Any], depth: int = 2) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple) and depth:
            yield from _inside(value, depth - 1)
        elif isinstance(value, dict) and depth:
            yield from _inside(value.values(), depth - 1)
        else:
            yield value


def _reads_gradients(stack: RawStack) -> bool:
    """Whether a file of the program on the stack reads some ``.grad``."""
    files = {code.co_filename for code in stack.codes if is_user_file(code.co_filename)}
    return any(map(source.reads_gradients, files))


def cut_off(
    cut: dict[int, Cut], missing: list[Any], names: Callable[[], dict[int, str]], held: int, made: Frame | None
) -> dict[int, Cut]:
    """Return the parameters of ``cut`` that were not to be left out, by ``id``.

    Networks are often frozen by ``no_grad`` or ``detach``: those count if the optimizer made at ``made``, which has
    ``held`` parameters, was given them by name, and no other line calls that network with a graph. Numbers count if
    something is computed with them.
    """
    alone = set[int]()
    if made is not None and any(one.how in _FREEZES for one in cut.values()) and len(named := names()) == held:
        for given in source.given_to_optimizer(made):
            own = {key for key, path in named.items() if _dotted(given) in _dotted(path)}
            files = {frame.file for key in own & cut.keys() for frame in symbolise(cut[key].stack).user_frames}
            if own <= {id(one) for one in missing} and not any(
                source.is_called_with_graph(one, given) for one in files
            ):
                alone |= own
    return {
        key: one
        for key, one in cut.items()
        if (key in alone and _is_always_frozen(one) if one.how in _FREEZES else _is_meant(one))
    }


def _is_always_frozen(cut: Cut) -> bool:
    """Whether nothing decides at run time that the graph is left there: ``set_grad_enabled(epoch > 5)``, an ``if``."""
    frames = symbolise(cut.stack).user_frames
    around = source.context_around(frames, _WITHOUT_GRAPH) if cut.how == "no_grad" else None
    place = around[0] if around is not None else frames[-1] if frames and cut.how == "detached" else None
    return place is not None and not source.is_conditional(place)


def _is_meant(cut: Cut) -> bool:
    frame = symbolise(cut.stack).user_frame
    return cut.how != "number" or (frame is not None and source.is_computed_with(frame))


def _dotted(name: str) -> str:
    return re.sub(r"\W+", ".", f".{name}.")


def is_step_chosen(made: RawStack, ran: RawStack, stepped: Iterable[RawStack]) -> bool:
    """Whether the program names a step of an optimizer that has not run, or chooses the one that it steps.

    With the stacks of its construction, of a backward, and of the steps of others in that round.
    """
    frames = [symbolise(one).user_frame for one in (made, ran)]
    others = [symbolise(one).user_frame for one in stepped]
    if frames[0] is None or frames[1] is None:
        return False
    return source.may_step(frames[0], frames[1]) or any(one is not None and source.steps_one_of(one) for one in others)


def adds_up_parts(cleared: Any, backward: Any, step: Any) -> bool:
    """Whether the source at these stacks shows that gradients cleared part by part were meant to be accumulated."""
    cleared_at, ran_at, stepped_at = (symbolise(one).user_frames for one in (cleared, backward, step))
    return source.clears_each_part(cleared_at, ran_at, stepped_at)


def is_bound_after(made: Frame, path: str) -> bool:
    """Whether a name is only bound behind the line ``made``, in its function."""
    places = [place for _, place in source.assignments(made, path)]
    return bool(places) and all(source.in_same_function(one, made) and one.line > made.line for one in places)
