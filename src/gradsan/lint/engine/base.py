"""Common base of the abstract interpreter: clock, frames, bounds, findings, and joins of values."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from gradsan.lint._findings import Hit, Place
from gradsan.lint.engine.state import State, joined
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Branches,
    Choice,
    ClassValue,
    Content,
    Function,
    Memory,
    Node,
    Object,
    Plain,
    Site,
    Tensor,
    Value,
)

_ALTERNATIVES = 4


class EnoughError(Exception):
    """The analysis has reached its bounds."""


@dataclass(slots=True)
class Frame:
    """A function, or the module, during its analysis. ``chain`` are the frames in which its names are looked up."""

    number: int
    name: str
    chain: tuple[int, ...]
    owner: ClassValue | None = None
    me: Value | None = None
    returned: list[tuple[Value, State, Site]] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    outer_names: dict[str, int] = field(default_factory=dict)
    yielded: list[Value] = field(default_factory=list)
    is_root: bool = False


@dataclass(slots=True)
class Loop:
    """A loop during its analysis: the states in which its body leaves it, or continues with the next iteration."""

    breaks: list[State] = field(default_factory=list)
    continues: list[State] = field(default_factory=list)


@dataclass(slots=True)
class LoopEntry:
    """An entered loop: its syntax, and the clock at its first iteration."""

    node: ast.AST
    clock: int
    depth: int = 0


class Base:
    """State of the analysis of one file."""

    statements_left = 4_000
    trusts = True
    """Whether findings here may be certain: not in functions that seem to serve evaluation."""

    next_is_root = False
    """Whether the function that is entered next is analysed by itself."""

    def __init__(self, module: ast.Module) -> None:
        """Start with nothing of ``module`` analysed."""
        self.module = module
        self.clock = 0
        self.frames: list[Frame] = []
        self.frame_count = 0
        self.hits: dict[tuple[str, int, int], Hit] = {}
        self.statement: ast.AST = module
        self.functions_run: set[ast.AST] = set()
        self.rerun: list[tuple[int, int]] = []
        """From when to when checkpointed functions ran: backward runs them again, with what is there by then."""
        self.given: set[Tensor] = set()
        """Arguments of callers, and values left by other methods: they may have graphs that are not analysed."""

    # -- the clock, places, bounds

    def tick(self) -> int:
        """Advance the clock and return it."""
        self.clock += 1
        return self.clock

    def site(self, node: ast.AST) -> Site:
        """The place of ``node`` in the function under analysis."""
        return Site(node, self.frames[-1].name if self.frames else "<module>")

    # -- findings

    def report(
        self,
        code: str,
        slug: str,
        at: Site,
        state: State,
        level: int,
        values: Mapping[str, object],
        places: Many[tuple[str, Site]] = (),
        fix: str = "",
    ) -> None:
        """Report a fault at ``at``; ``level`` is YES where it is certain. ``places`` are (role, place), in order."""
        if state.quiet or level == NO:
            return
        is_sure = level == YES and self.trusts
        shown = tuple(Place(role, place.node, place.function) for role, place in places)
        hit = Hit(code, slug, Place("", at.node, at.function), is_sure, values, shown, fix)
        known = self.hits.get(hit.key)
        if known is None or (is_sure and not known.is_sure):
            self.hits[hit.key] = hit

    # -- values

    def fresh(self, *, certain: bool = False, grad: int = MAYBE, text: str = "") -> Tensor:
        """A tensor in memory of its own, or an unknown value."""
        return Tensor((Memory(),), grad, None, self.tick(), is_certain=certain, text=text)

    def held(self, owner: Value, state: State) -> list[Value]:
        """The items of a container."""
        items = state.heap.get((owner, "@items"))
        return list(items) if isinstance(items, tuple) else []

    def merge(
        self, one: Value, other: Value, branches: Branches, sides: tuple[Branches, Branches] | None = None
    ) -> Value:
        """One value for ``one`` or ``other``."""
        if one is other:
            return one
        if isinstance(one, Plain) and isinstance(other, Plain):
            same = one.known and other.known and type(one.value) is type(other.value) and one.value == other.value
            if same or (not one.known and not (other.known and other.value is None)):
                return one
            if one.known and one.value is None and not (other.known and other.value is None):
                return Choice((one, other), branches)
            return Plain()
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return self._either(one, other, sides)
        parts: list[Value] = []
        for value in (one, other):
            for part in value.values if isinstance(value, Choice) else (value,):
                if part not in parts:
                    parts.append(part)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if len(tensors) > 1:
            both: Tensor = tensors[0]
            for tensor in tensors[1:]:
                both = self._either(both, tensor, sides)
            parts = [both, *(part for part in parts if not isinstance(part, Tensor))]
        return parts[0] if len(parts) == 1 else Choice(tuple(parts[:_ALTERNATIVES]), branches)

    def _either(self, one: Tensor, other: Tensor, sides: tuple[Branches, Branches] | None) -> Tensor:
        memories = tuple(dict.fromkeys((*one.memories, *other.memories)))[:6]
        parents: tuple[Node | Tensor, ...] = tuple(
            tensor.node or tensor for tensor in (one, other) if tensor.grad > NO or tensor.node is not None
        )
        clock = self.tick()
        # An undecided choice: values of another path do not apply.
        own = sides or (((clock, 0),), ((clock, 1),))
        lies: dict[Memory, Branches] = {**(one.branches_of or {}), **(other.branches_of or {})}
        for tensor, branches, rest in ((one, own[0], other), (other, own[1], one)):
            for memory in tensor.memories:
                if memory not in rest.memories and memory not in lies:
                    lies[memory] = branches
        node = Node("either", parents, (), self.site(self.statement), clock, max(one.grad, other.grad))
        is_leaf = one.is_leaf and other.is_leaf
        return Tensor(
            memories,
            max(one.grad, other.grad),
            None if is_leaf or not parents else node,
            min(one.clock, other.clock),
            is_leaf,
            one.is_certain and other.is_certain,
            one.view if one.view == other.view else "",
            one.is_cut and other.is_cut,
            one.is_counted or other.is_counted,
            one.is_array and other.is_array,
            tuple(dict.fromkeys((*one.owners, *other.owners))),
            one.text or other.text,
            one.constant if one.constant is other.constant else None,
            one.is_reduced and other.is_reduced,
            one.terms & other.terms,
            lies,
        )

    def examine(self, one: Content, other: Content) -> Content:
        """The content of a memory that was written on one of two paths, or differently on both."""
        parents = tuple(node for node in (one.node, other.node) if node is not None)
        grad = max(one.grad, other.grad)
        node = Node("either", parents, (), self.site(self.statement), self.tick(), grad) if parents else None
        return Content(min(one.clock, other.clock), node, grad)

    def join(self, one: State | None, other: State | None, branches: Branches) -> State | None:
        """The state after two joining paths."""
        return joined(one, other, branches, self.merge, self.examine)

    # -- interface between the parts

    def evaluate(self, node: ast.expr, state: State) -> Value:
        """The value of an expression. See :class:`Expressions`."""
        raise NotImplementedError

    def call(self, callee: Value, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        """The result of a call. See :class:`Calls`."""
        raise NotImplementedError

    def attribute(self, owner: Value, name: str, node: ast.AST, state: State) -> Value:
        """The value of ``owner.name``. See :class:`Attributes`."""
        raise NotImplementedError

    def block(self, body: Many[ast.stmt], state: State) -> State | None:
        """The state after a block, None where all its paths leave early. See :class:`Statements`."""
        raise NotImplementedError

    def run_function(
        self,
        function: Function,
        args: list[Value],
        keywords: dict[str, Value],
        state: State,
        me: Value | None = None,
    ) -> Value:
        """The result of a function of the file. See :class:`Calls`."""
        raise NotImplementedError

    def find_function(self, kind: ClassValue, name: str, *, behind: ClassValue | None = None) -> Function | None:
        """The function ``name`` of a class or of its bases; classes up to ``behind`` in the MRO are skipped."""
        order = self.order_of(kind)
        if behind is not None and behind in order:
            order = order[order.index(behind) + 1 :]
        return next((one.functions[name] for one in order if name in one.functions), None)

    def order_of(self, kind: ClassValue) -> list[ClassValue]:
        """A class and its bases in this file, in the order in which names are looked up."""
        order = [kind]
        for base in kind.bases:
            if isinstance(base, ClassValue):
                order += [one for one in self.order_of(base) if one not in order]
        return order

    def is_module(self, value: Value) -> bool:
        """Whether an object is a ``torch.nn.Module``."""
        return isinstance(value, Object) and value.kind.is_module
