"""Clues: what was found out about a failure, by role, with typed facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradsan.model._events import Held, Passed, Site


@dataclass(frozen=True, slots=True)
class Clue:
    """Something that the detectors found out about a failure, by its ``role``.

    Roles are named where they are gathered (``gradsan.errors``): ``leaf``, ``view_made``, ``base_written``,
    ``freed_by``, ``graph_cut`` … ``name`` is what the tensor is called, ``op`` the operation or Node, ``site`` where it
    happened, ``values`` further plain facts (numbers, strings, booleans, and tuples of them). What has more structure
    has a class of its own.
    """

    role: str
    site: Site | None = None
    name: str | None = None
    op: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the tensor that it is about; empty where that is not known."""
        sizes = self.values.get("shape")
        return tuple(sizes) if isinstance(sizes, tuple | list) else ()

    @property
    def dtype(self) -> str:
        """The dtype of that tensor; ``?`` where it is not known."""
        return str(self.values.get("dtype") or "?")

    @property
    def device(self) -> str:
        """Its device; ``?`` where it is not known."""
        return str(self.values.get("device") or "?")

    def count(self, fact: str) -> int:
        """A fact that is a number; 0 where there is none."""
        number = self.values.get(fact)
        return number if isinstance(number, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldClue(Clue):
    """A live variable whose graph leads to what was freed."""

    held: Held


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClue(Clue):
    """The Nodes from the loss to the one that was freed."""

    passed: tuple[Passed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveClue(Clue):
    """What was alive at a failure, in one function.

    ``requires_grad`` says of a tensor by its name whether it requires grad, of a module whether any of its parameters
    does; ``callees`` of what can be called where the function that runs is: (file, first line, name). ``switched_off``
    are the modules that an optimizer has and of which no parameter requires grad, ``in_vain`` those of them whose
    optimizer has nothing else to train.
    """

    requires_grad: Mapping[str, bool]
    callees: Mapping[str, tuple[str, int, str]]
    switched_off: tuple[str, ...]
    in_vain: tuple[str, ...]
