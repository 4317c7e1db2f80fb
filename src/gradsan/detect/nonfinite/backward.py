"""Non-finite gradients: a hook behind every Node of a backward that starts from a finite loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.detect.nonfinite.origins import How, Origin, Origins, Searched, first_cause, operands_of
from gradsan.graph import walk
from gradsan.model import Frame, Operand
from gradsan.record.guarding import after_node, before_node
from gradsan.record.ledger import call_that_made
from gradsan.record.log import Core, RawStack
from gradsan.record.stacks import symbolise
from gradsan.record.steps import running_here
from gradsan.record.user_hooks import has_tensor_hooks

_MOVING = frozenset(
    {
        *("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"),
        *("ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0"),
        *("AliasBackward0", "CloneBackward0", "SelectBackward0", "SliceBackward0"),
    }
)
"""Nodes whose gradient is their input, rearranged or padded with zeros: only a hook can make it non-finite."""


@dataclass(slots=True)
class _Run:
    """One backward: its Nodes, the hooks on them, and the origins of the non-finite gradients that Nodes were given."""

    nodes: list[Node] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    given: dict[Any, list[Origin]] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)
    roots: tuple[Node, ...] = ()


class Backward:
    """Puts hooks on the Nodes of a backward, and removes them when it has ended."""

    def __init__(self, core: Core, origins: Origins, is_busy: threading.local, on_cut: Any) -> None:
        """Take ``is_busy``, which marks gradsan's own calls, and ``on_cut``, called where a graph is too long."""
        self._core, self._origins, self._busy, self._on_cut = core, origins, is_busy, on_cut
        self.inside: Callable[[Any, tuple[Any, ...], Any], Origin | None] | None = None
        """Returns the origin, inside a compiled Node, of its non-finite gradients for given finite ones; or None."""
        self._runs: dict[int, _Run] = {}

    def install(self, quietly: Callable[[Callable[[], None]], None]) -> None:
        """Set ``quietly``, which runs the costlier work and keeps its failures from the program."""
        self._quietly = quietly

    def begin(self, clock: int, roots: tuple[Node, ...]) -> None:
        """Watch the backward that begins at ``clock`` from ``roots``."""
        run = _Run(roots=roots)
        self._runs[clock] = run
        for node in walk.each_behind(roots):
            kind = type(node).__name__
            leaf = getattr(node, "variable", None) if kind == "AccumulateGrad" else None
            if leaf is not None:
                run.leaves.append(leaf)
                if _torch.has_backward_hooks(leaf):
                    run.handles.append(before_node(node, partial(self._before_leaf, run, node)))
            elif kind in _MOVING and node not in roots and not has_tensor_hooks(node):
                continue
            elif len(run.nodes) >= walk.NODES_WALKED:
                self._on_cut()
                break
            else:
                run.handles.append(after_node(node, partial(self._after, run, len(run.nodes))))
                run.nodes.append(node)

    def end(self, clock: int) -> list[tuple[Any, Origin]]:
        """Return the leaves that a backward gave non-finite gradients, each with their origin."""
        run = self._runs.pop(clock, None)
        if run is None:
            return []
        self._let_go(run)
        reached = []
        for node, origins in run.given.items():
            leaf = getattr(node, "variable", None)
            if _torch.is_tensor(leaf):
                reached.append((leaf, min(origins, key=lambda origin: origin.number)))
        return reached

    def has(self, clock: int) -> bool:
        """Whether the backward that began at ``clock`` is running and watched."""
        return clock in self._runs

    def given(self, clock: int) -> list[Origin]:
        """Return the origins of the non-finite gradients found so far in a running backward."""
        run = self._runs.get(clock)
        return [] if run is None else [origin for origins in run.given.values() for origin in origins]

    def leaves(self, clock: int) -> list[Any]:
        """Return the leaves of a running backward."""
        run = self._runs.get(clock)
        return [] if run is None else run.leaves

    def stop(self) -> None:
        """Remove all hooks of backwards that have not ended."""
        for run in self._runs.values():
            self._let_go(run)
        self._runs.clear()

    def _let_go(self, run: _Run) -> None:
        for handle in run.handles:
            handle.remove()
        # The hooks hold the run: without its Nodes that is no reference cycle.
        run.nodes.clear()
        run.handles.clear()

    def _before_leaf(self, run: _Run, node: Node, gradients: Any) -> None:
        """Check the gradient of a leaf after hooks of the program's have changed it."""
        gradient = gradients[0]
        if getattr(self._busy, "on", False) or gradient is None or not _torch.is_nonfinite(gradient):
            return
        self._quietly(lambda: self._give(run, node, gradient))

    def _give(self, run: _Run, node: Node, gradient: torch.Tensor) -> None:
        origin = self._origins.of(gradient)
        if origin is not None and origin not in run.given.get(node, ()):
            run.given.setdefault(node, []).append(origin)

    def _after(self, run: _Run, number: int, gradients: Any, given: Any) -> None:
        """Check the results of a Node: ``gradients`` for its inputs, computed from ``given`` ones of its outputs."""
        if getattr(self._busy, "on", False) or number >= len(run.nodes):
            return
        bad = [(at, one) for at, one in enumerate(gradients) if one is not None and _torch.is_nonfinite(one)]
        if bad:
            self._quietly(lambda: self._keep(run, run.nodes[number], bad, tuple(given)))

    def _keep(self, run: _Run, node: Node, bad: list[tuple[int, Any]], given: tuple[Any, ...]) -> None:
        came = [one for one in given if one is not None and _torch.is_nonfinite(one)]
        gradient = bad[0][1]
        # Code of the program's ran in the Node, and its own operation was seen.
        inside = self._inside(node, given, came) or self._origins.of(gradient)
        # Else a Node passed them on, or a hook of the program's set them.
        handed = [origin for one in came if (origin := self._origins.of(one)) is not None]
        stack = self.stack_of(node)
        # Saved values may have been bad already, without harm in the forward: 0 times inf.
        parents = tuple(run.given.get(node, ())) or tuple(handed) or (() if came else self._kept_bad(node, stack))
        if inside is not None:
            origin = inside
            made = first_cause(inside)[0]
            if made.in_backward and _place(made.stack) == _place(self._running_at()):
                # No line of the program made it, but code that a compiler has generated for the Node.
                made.stack = stack or made.stack
        elif came or parents:
            facts = Searched(came[0] if came else gradient)
            how: How = "passed" if parents else "given" if node in run.roots else "untraced"
            # The program has passed it to the backward call.
            at_call = self._running_at() if how == "given" else None
            origin = Origin(how, node.name(), at_call or stack, facts.value, facts=facts, parents=parents)
            # The place where bad input data is first combined with a parameter.
            origin.has_graph = not came
            origin.number = min((parent.number for parent in parents), default=0)
        else:
            facts = Searched(gradient)
            origin = Origin(
                "gradient",
                node.name(),
                stack,
                facts.value,
                facts=facts,
                operands=(*_given(given, facts), *_saved(node, facts)),
            )
            self._origins.keep(gradient, origin)
        for at, one in bad:
            # ``torch.autograd.grad`` returns it to the program.
            self._origins.link(one, origin)
            if at < len(node.next_functions):
                child = _watched(node.next_functions[at][0])
                if child is not None:
                    run.given.setdefault(child, []).append(origin)

    def _inside(self, node: Node, given: tuple[Any, ...], came: list[Any]) -> Origin | None:
        if self.inside is None or came or not _torch.is_compiled_node(node):
            return None
        return self.inside(node, given, self.stack_of(node))

    def _kept_bad(self, node: Node, stack: RawStack) -> tuple[Origin, ...]:
        """Return the origins of non-finite values that a Node had saved, if another operation made them.

        The -inf of a mask, a constant of the program, is meant.
        """
        known = (self._origins.of(value) for _, value in _values_kept(node) if _torch.is_nonfinite(value))
        found = [(one, first_cause(one)[0]) for one in known if one is not None]
        here = _place(stack) if found else None
        return tuple(
            one
            for one, first in found
            if (first.how != "constant" or not (first.value == "-inf" or first.has_graph))
            and _place(first.stack) != here
        )

    def _running_at(self) -> Any:
        """Return the raw stack of the backward call that this thread works for; None where it is unknown."""
        running = running_here(self._core)
        return None if running is None else running[1]

    def stack_of(self, node: Node) -> Any:
        """Return the raw stack of the call that made a Node; None where it is not in the log."""
        # A thread of the engine runs Nodes that the calling thread has made.
        running = running_here(self._core)
        thread = threading.get_ident() if running is None else running[2]
        made = call_that_made(self._core, _torch.node_sequence(node), thread)
        return None if made is None else made.stack


def _watched(node: Node | None) -> Any:
    """Return the Node whose hook checks a gradient for ``node``: the first one below that computes."""
    while node is not None and type(node).__name__ in _MOVING and not has_tensor_hooks(node):
        node = node.next_functions[0][0]
    return node


def _place(stack: RawStack) -> Frame | None:
    return None if stack is None else symbolise(stack).user_frame


def _given(given: tuple[Any, ...], facts: Searched) -> Iterator[Operand]:
    named = ((f"grad {at}", one) for at, one in enumerate(given) if one is not None and _torch.can_be_nonfinite(one))
    yield from operands_of(named, facts.index, facts.shape)


def _saved(node: Node, facts: Searched) -> Iterator[Operand]:
    for slot, value in _values_kept(node):
        yield from operands_of([(slot, value)], facts.index, facts.shape)


def _values_kept(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the values that a Node has saved, as far as readable: nothing is freed before its hooks have run."""
    for slot, saved in _torch.saved_slots(node):
        if _torch.is_hooked(saved):
            continue
        try:
            value = _torch.read_slot(node, slot)
        except (RuntimeError, AttributeError):
            continue
        if _torch.is_tensor(value) and _torch.can_be_nonfinite(value):
            yield slot, value
