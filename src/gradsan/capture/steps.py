"""Optimizer steps and backward calls: the two kinds of event that give the others their meaning."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsan.capture import _torch
from gradsan.capture.patches import Patches

STEPS_KEPT = 512


class StepRecord:
    """One ``optimizer.step()``: when, where, and the version of each parameter with a gradient before and after."""

    __slots__ = ("after", "before", "clock", "end", "number", "optimizer", "sequence", "stack", "storages")

    def __init__(self, clock: int, number: int, optimizer: str, stack: Any, sequence: int) -> None:
        """A step that has begun; ``end`` is None while it runs."""
        self.clock = clock
        self.end: int | None = None
        self.number = number
        self.optimizer = optimizer
        self.stack = stack
        self.sequence = sequence
        self.storages: array[int] = array("q")
        self.before: array[int] = array("q")
        self.after: array[int] = array("q")


class BackwardRecord:
    """One call into the autograd engine. ``roots`` are the Nodes it starts from, held only while it runs."""

    __slots__ = ("clock", "retain_graph", "root_sequence", "roots", "stack", "thread", "via")

    def __init__(self, clock: int, stack: Any, via: str, retain_graph: bool, roots: list[Any]) -> None:
        """A backward that has begun in this thread."""
        self.clock = clock
        self.stack = stack
        self.via = via
        self.retain_graph = retain_graph
        self.roots = roots
        numbers = [number for number in map(_torch.node_sequence, roots) if number is not None]
        self.root_sequence = max(numbers, default=None)
        self.thread = threading.get_ident()


class Steps:
    """The steps and backward calls of a run."""

    def __init__(self, core: Any) -> None:
        """Log into ``core``'s clock."""
        self._core = core
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self.backwards = 0
        self._running: list[BackwardRecord] = []
        self._open: list[tuple[Any, StepRecord, list[Any]]] = []

    def clear(self) -> None:
        """Forget what was logged."""
        self.steps.clear()
        self.backwards = 0

    def install(self, patches: Patches) -> None:
        """Watch every optimizer's ``step`` (by torch's public hooks) and every entry into the engine."""
        for handle in (register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._finish)):
            patches.on_undo(handle.remove)
        for namespace, name in _torch.engine_entry_points():
            patches.set(namespace, name, self._watch(getattr(namespace, name)))

    def current_backward(self) -> BackwardRecord | None:
        """The innermost backward of this thread, or the last one begun where the engine runs in a thread of its own."""
        here = threading.get_ident()
        for record in reversed(self._running):
            if record.thread == here:
                return record
        return self._running[-1] if self._running else None

    def _watch(self, run: Any) -> Any:
        core = self._core
        running = self._running

        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not core.active:
                return run(t_outputs, *args, **kwargs)
            retain = bool(args[1]) if len(args) > 1 else bool(kwargs.get("keep_graph"))
            via = "backward" if kwargs.get("accumulate_grad", True) else "grad"
            roots = [root for root in map(_root_node, t_outputs) if root is not None]
            record = BackwardRecord(core.tick(), core.stack(1), via, retain, roots)
            self.backwards += 1
            running.append(record)
            try:
                return run(t_outputs, *args, **kwargs)
            finally:
                record.roots = []
                running.remove(record)

        return _torch.dress(run_backward, run)

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        core = self._core
        record = StepRecord(core.tick(), core.steps, type(optimizer).__name__, core.stack(1), _torch.sequence_number())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        storages = array("q", map(_torch.storage_identity, parameters))
        previous = self.steps[-1] if self.steps else None
        record.storages = previous.storages if previous is not None and previous.storages == storages else storages
        record.before = array("q", [p._version for p in parameters])
        self.steps.append(record)
        self._open.append((optimizer, record, parameters))
        core.open_steps += 1

    def _finish(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        core = self._core
        while self._open:
            # A step that raised has no post hook: its record stays open and is closed with the next one outside it.
            opened, record, parameters = self._open.pop()
            record.after = array("q", [p._version for p in parameters])
            record.end = core.tick()
            core.open_steps = max(0, core.open_steps - 1)
            if opened is optimizer:
                break
        core.steps += 1


def _root_node(output: Any) -> Any:
    """The Node a backward starts from: of a tensor its grad_fn, of a GradientEdge its node."""
    return output.node if hasattr(output, "node") else output.grad_fn
