"""Fixes for a graph computed once and used by backward in every round: recomputed, or detached (GS110, GS403)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsan import heuristics, source
from gradsan.model import Fix, Frame, Lines, Message


@dataclass(frozen=True, slots=True)
class BuiltOnce:
    """The value ``name``, bound by the statement at ``bound_at``.

    ``made`` are the frames of the operation that made it, outermost first, ``used`` that of the later round's backward.
    """

    name: str | Message
    bound_at: Frame | None
    made: Sequence[Frame]
    used: Frame | None


def anew_or_cut(once: BuiltOnce) -> tuple[Fix, ...]:
    """Both fixes, the likelier one first; only the detach where the rounds compute the very same value themselves."""
    values = {"name": once.name}
    again = Fix.worded("help.build_each_round", values, kind="recompute_forward")
    without = _cuts(once, values)
    bound_at, used = once.bound_at, once.used
    if bound_at is not None and used is not None and source.is_computed_in_rounds(bound_at, used):
        # Both are compared, like old and new probabilities: recomputed, the old one would be the new one.
        return without
    if not isinstance(once.name, str):
        return again, *without
    holder = _holder_bound(once)
    is_cached = any(one.function.endswith("__init__") or source.is_filled_once(one) for one in once.made)
    is_stored = "[" in once.name and holder is None and not is_cached
    if is_stored or (bound_at is None and "." in once.name and holder is not None):
        # A part of a batch or a rollout, whose data would be computed again, too; or what a method has stored.
        return *without, again
    # A loss's target keeps its computed value; a name that suggests one puts the detach first, and a run decides.
    if bound_at is not None and used is not None and source.is_target_in_rounds(bound_at, used, once.name):
        return *without, again
    if heuristics.stays_as_computed(once.name):
        unsure = (
            replace(one, how_changed=Message("fix.stays_or_follows", {"how": one.how_changed})) for one in without
        )
        return *unsure, again
    return again, *without


def _cuts(once: BuiltOnce, values: dict[str, str | Message]) -> tuple[Fix, ...]:
    """The value detached; and where its statement binds others beside it, the statement under ``no_grad``."""
    cut, under = _cut_off(once), _under_no_grad(once)
    found: list[Fix] = []
    if cut:
        found.append(Fix.worded("help.build_without_graph", values, cut, kind="detach_built_once"))
    if under and (not cut or _gives_several(once)):
        found.append(Fix.worded("help.build_under_no_grad", values, under, kind="detach_built_once"))
    return tuple(found) or (Fix.worded("help.build_without_graph", values, kind="no_grad"),)


def _gives_several(once: BuiltOnce) -> bool:
    statement = None if once.bound_at is None else source.statement_at(once.bound_at)
    return statement is not None and len(source.assigned_names(statement)) > 1


def _cut_off(once: BuiltOnce) -> Lines:
    """The line that computes the value, detached."""
    if once.bound_at is None or not isinstance(once.name, str):
        return ()
    return source.changed_lines(once.bound_at.file, source.detach_at(once.bound_at, once.name))


def _under_no_grad(once: BuiltOnce) -> Lines:
    """The statement that binds the value or its container (``grams`` of ``grams["b"]``), under ``no_grad``."""
    bound_at = once.bound_at or _holder_bound(once)
    return source.changed_at(bound_at, source.under_no_grad)


def _holder_bound(once: BuiltOnce) -> Frame | None:
    """The frame binding ``grams`` of ``grams["b"]``, ``self.grams`` before ``self``, ``batch`` of ``batch.value``."""
    if not isinstance(once.name, str):
        return None
    chain = once.name.partition("[")[0]
    found = (source.binding_of(once.made, one) for one in (chain, chain.partition(".")[0]))
    return next((one for one in found if one is not None), None)
