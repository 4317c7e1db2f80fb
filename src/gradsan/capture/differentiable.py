"""What is remembered of gradients that can be differentiated again, and of updates by them; no graph is kept alive."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradsan.capture.sampled import Sample
from gradsan.model import Failure


class Graph:
    """The graph of some gradients, told by a hook that lives as long as one of its first Nodes does."""

    def __init__(self, gradients: list[Any]) -> None:
        """Have the Nodes that made ``gradients`` tell when they run."""
        self.was_used = False

        def used(_: Any) -> None:
            self.was_used = True

        nodes = {gradient.grad_fn for gradient in gradients}
        self._alive = weakref.ref(used)
        self._handles = [node.register_prehook(used) for node in nodes]

    @property
    def is_gone(self) -> bool:
        """Whether nobody can differentiate the gradients any more."""
        return self._alive() is None

    def let_go(self) -> None:
        """Be told no more."""
        for handle in self._handles:
            handle.remove()


class Update(NamedTuple):
    """The first write to one of the leaves since their gradients were taken.

    ``by_grad`` says that it works with ``.grad``: an optimizer, or code that reads that attribute.
    """

    clock: int
    stack: Any
    op: str
    sequence: int
    by_grad: bool


@dataclass(slots=True)
class Asked:
    """A call that took gradients with ``create_graph=True``; ``update`` is known once leaves have moved.

    ``fills_grad`` tells ``backward`` from ``grad``.
    """

    clock: int
    stack: Any
    thread: int
    samples: list[Sample]
    graph: Graph
    fills_grad: bool
    update: Update | None = None
    calls: int = 0


@dataclass(slots=True)
class Lost:
    """What is to be told if it proves true: ``origin`` are the leaves before the first of the updates.

    ``is_own`` says that the update is by these gradients as far as one sees: not by others, in ``.grad``, that point
    the same way. ``is_strong``: by all signs a step that is part of the computation.
    """

    key: tuple[Any, Any]
    graph: Graph
    origin: list[Sample]
    failure: Failure
    is_own: bool
    is_strong: bool = False
    calls: int = 0
