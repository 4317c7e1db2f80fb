"""Checks at the moment of a write: the memory bound of originals, and ``early``.

With ``early``, the check is whether a live graph still holds the overwritten value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from gradsan import _torch
from gradsan._collector import kinds_below, objects_of
from gradsan.graph import naming, walk
from gradsan.model import Conflict, Site, Use
from gradsan.originals.deep import Deep
from gradsan.originals.originals import Kept
from gradsan.record.demands import FOUND_AT_WRITE, Demands
from gradsan.record.guarding import numbered_apart
from gradsan.record.log import Core
from gradsan.record.stacks import is_own_file


class Overwriting:
    """Checks the writes of a run to values kept by deep mode, while a stretch demands it."""

    def __init__(
        self,
        core: Core,
        deep: Deep,
        demands: Demands,
        keep: Callable[[Callable[[], Conflict]], None],
        guard: Callable[[Callable[[], object]], None],
    ) -> None:
        """Take ``keep``, called with a function that makes a conflict, and ``guard``, run around gradsan's own work."""
        self._core, self._deep, self._demands, self._keep, self._guard = core, deep, demands, keep, guard
        self._hook: Any = None

    def follow(self, is_deep: bool) -> None:
        """Begin or end checking, according to the current demands."""
        bound, deep = self._demands.max_bytes, self._deep
        if not is_deep or (bound is None and not self._demands.early):
            deep.holdings, self._core.tells_all_writes = None, False
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            return
        if deep.holdings is None:
            from gradsan.originals.held_memory import Holdings

            deep.holdings = Holdings(bound)
            self._core.tells_all_writes = True
            self._hook = numbered_apart(register_optimizer_step_post_hook(self._stepped))
        deep.holdings.max_bytes = bound

    def written(self, tensor: torch.Tensor) -> None:
        """Check a written tensor. Raises GradsanError if the program is to be stopped, or healing ends."""
        if self._core.tells_all_writes:
            self._guard(lambda: self._look_at(_torch.storage_or_none(tensor)))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = _torch.parameters_of(optimizer)
        for storage in dict.fromkeys(map(_torch.storage_or_none, parameters)):
            self._guard(lambda storage=storage: self._look_at(storage))  # type: ignore[misc]

    def _look_at(self, storage: int) -> None:
        deep = self._deep
        holdings = deep.holdings
        if holdings is None or not storage or deep.is_measuring:
            return
        if holdings.max_bytes is not None:
            holdings.look_at(storage)
        if self._demands.early:
            for kept in holdings.of(storage):
                if not kept.reported and not kept.is_emptied and kept.changed:
                    self._report(kept)

    def _report(self, kept: Kept) -> None:
        node, root = _holder(kept)
        slot = _torch.slot_of(node, kept)
        counted = kept.moved
        if not counted and self._is_put_back():
            return
        # A counter that moved stops backward even if it does not read the value.
        if not counted and (not _torch.is_read_by_backward(node, slot) or _torch.is_filled_after_save(node, slot)):
            return

        def describe() -> Conflict:
            found = self._deep.describe(kept, counted, counted, True, None, None, node)
            use = Use(self._core.clock, Site(), found.use.version, found.use.step, None, FOUND_AT_WRITE)
            return replace(found, use=use, root_sequence=root, bridge=None)

        if not self._deep.heals(kept, describe):
            kept.reported = 1
            self._keep(describe)

    def _is_put_back(self) -> bool:
        """Whether the current write is one of ``gradcheck``, which undoes it before it returns."""
        files = (code.co_filename for code in self._core.stack(0).codes)
        return _torch.puts_back_what_it_writes(next((file for file in files if not is_own_file(file)), ""))


def _holder(kept: Kept) -> tuple[Any, int | None]:
    """The Node that keeps a value, and the youngest root (its number) leading to it; (None, None) if not found."""
    roots = list(dict.fromkeys(_live_roots()))
    for node in walk.engine_order(roots):
        if _torch.slot_of(node, kept) is not None:
            leading = walk.lead_to(roots, node)
            numbers = [number for one in leading if (number := _torch.node_sequence(one)) is not None]
            return node, max(numbers, default=None)
    return None, None


def _live_roots() -> Iterator[Any]:
    for one in objects_of({torch.Tensor, *kinds_below(torch.Tensor)}):
        with contextlib.suppress(RuntimeError):
            if naming.has_graph(one):
                yield one.grad_fn
