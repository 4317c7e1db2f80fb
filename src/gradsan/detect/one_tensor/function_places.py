"""Tensors that the forward of a custom Function keeps on a class or in a global, where its backward reads them.

``Swish.saved = x`` is one place for all calls: the next call stores its own tensor there, and the backwards of both
read that. Noted when ``apply`` returns, by the names that the bytecode of forward binds and that of backward reads, and
checked before a backward. Only a tensor of the shape of the Function's inputs or outputs counts as a value of that
call: a running statistic is shared on purpose. A tensor with the same elements was recomputed.

Row: ``kept_for_all_calls``. Roles: ``applied`` (the earlier call; ``name`` of the Function; ``values``: ``shape``,
``dtype``, ``device``), ``again`` (the call that has stored another tensor there; ``name`` of the place).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph.bytecode import functions_of, getattr_static, reads_of
from gradsan.model import Clue, Failure
from gradsan.record.log import RawStack
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward

ROW = "kept_for_all_calls"
_ELEMENTS = 256


class _Place(NamedTuple):
    """A global or closure variable, or an attribute of one, that ``function`` reads."""

    function: FunctionType
    globals: dict[str, Any]
    variable: str
    attribute: str | None

    @property
    def text(self) -> str:
        """The place as the program writes it."""
        return self.variable if self.attribute is None else f"{self.variable}.{self.attribute}"

    def value(self) -> Any:
        """Return the current value; None where there is none."""
        names, cells = self.function.__code__.co_freevars, self.function.__closure__ or ()
        value = self.globals.get(self.variable)
        if self.variable in names:
            try:
                value = cells[names.index(self.variable)].cell_contents
            except ValueError:  # an empty cell
                return None
        return value if self.attribute is None else getattr(value, "__dict__", {}).get(self.attribute)


class _Kept(NamedTuple):
    place: _Place
    weak: Any
    sample: Any
    facts: dict[str, Any]
    name: str
    stack: RawStack


class KeptForAllCalls:
    """Notes such tensors by the Nodes of their calls; findings go to ``found``."""

    def __init__(self, found: Callable[[Failure], None]) -> None:
        self._found = found
        self._kept: weakref.WeakKeyDictionary[Any, list[_Kept]] = weakref.WeakKeyDictionary()
        self._places: weakref.WeakKeyDictionary[Any, tuple[_Place, ...]] = weakref.WeakKeyDictionary()
        self._last: dict[str, Any] = {}
        self._described: set[Any] = set()

    @property
    def has_any(self) -> bool:
        """Whether a live graph may have such a Function."""
        return bool(self._kept)

    def applied(self, kind: Any, node: Node, tensors: Iterable[torch.Tensor], stack: Callable[[], Any]) -> None:
        """Note a Function applied to ``tensors`` (its outputs included), with its Node ``node``."""
        places = self._places.get(kind)
        if places is None:
            places = self._places[kind] = _places(kind)
        shapes = {tuple(one.shape) for one in tensors} if places else ()
        for place in places:
            value = place.value()
            if type(value) in _torch.PLAIN_TENSORS and value.numel() > 1 and tuple(value.shape) in shapes:
                self._last[place.text] = where = stack()
                # A checkpointed function is rerun before its backward, and binds the value anew.
                if any(code.co_filename == torch.utils.checkpoint.__file__ for code in where.codes):
                    continue
                kept = _Kept(
                    place, _torch.weak_tensor(value), _some(value), _torch.facts_of(value), kind.__name__, where
                )
                self._kept.setdefault(node, []).append(kept)

    def before_backward(self, entry: RawBackward, order: Iterable[Node]) -> None:
        """Check the Functions among the Nodes of a backward."""
        for node in order:
            for one in self._kept.get(node, ()) if _torch.is_custom_node(node) else ():
                again = self._last.get(one.place.text)
                if again is not None and one.stack not in self._described and self._is_another(one):
                    self._described.add(one.stack)
                    clues = (
                        Clue("applied", symbolise(one.stack), name=one.name, values=one.facts),
                        Clue("again", symbolise(again), name=one.place.text),
                    )
                    self._found(Failure(ROW, "", "", symbolise(entry.stack), clues, raised=False))

    @staticmethod
    def _is_another(one: _Kept) -> bool:
        now = one.place.value()
        if type(now) not in _torch.PLAIN_TENSORS or now is one.weak():
            return False
        sample = _some(now)
        return sample.shape != one.sample.shape or bool((sample != one.sample).any())


def _places(kind: Any) -> tuple[_Place, ...]:
    """Return the places that the forward of a Function binds and its backward reads."""
    bound = {name for one in functions_of(getattr_static(kind, "forward")) for name in reads_of(one.__code__).bound}
    return tuple(place for one in functions_of(getattr_static(kind, "backward")) for place in _read(one, bound))


def _read(function: FunctionType, bound: set[str]) -> Iterator[_Place]:
    reads, names = reads_of(function.__code__), function.__globals__
    for variable, attributes in (*reads.globals.items(), *reads.free.items()):
        if variable in bound:
            yield _Place(function, names, variable, None)
        for attribute in sorted((attributes or frozenset()) & bound):
            yield _Place(function, names, variable, attribute)


def _some(tensor: torch.Tensor) -> Any:
    """Return some elements at even distances."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        return flat[:: max(1, -(-flat.numel() // _ELEMENTS))].clone()
