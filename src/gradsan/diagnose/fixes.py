"""Suggestions: what to change, with the concrete changed line where the source allows one. Nothing here was run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradsan import source
from gradsan.diagnose.carriers import Carrier, cut
from gradsan.diagnose.facts import Facts, place
from gradsan.model import Fix, Frame, Message, Site, Write


def out_of_place(facts: Facts) -> tuple[Fix, ...]:
    """Give the result a new tensor instead of overwriting: one changed line per writing line."""
    lines = _changes(facts.writes or facts.missed, source.out_of_place)
    return (_fix("out_of_place", "preserved", facts, lines),)


def clone_before_mutation(facts: Facts) -> tuple[Fix, ...]:
    """Write into a copy, leaving autograd the original."""
    writes = facts.writes or facts.missed
    lines = _changes(writes[:1], source.clone_before)
    return (_fix("clone_before_mutation", "preserved", facts, lines),)


def disable_inplace_module(facts: Facts) -> tuple[Fix, ...]:
    """Turn ``inplace=True`` off where it was asked for."""
    lines = _changes(facts.writes, lambda frame, _: source.inplace_false(frame))
    return (_fix("disable_inplace_module", "preserved", facts, lines),)


def list_and_stack(facts: Facts) -> tuple[Fix, ...]:
    """Collect the parts in a list and stack them, instead of filling a tensor."""
    return (_fix("list_and_stack", "preserved", facts, ()),)


def reorder_step(facts: Facts) -> tuple[Fix, ...]:
    """Do all backwards before any step."""
    return (_fix("reorder_step", "preserved", facts, ()),)


def recompute_forward(facts: Facts) -> tuple[Fix, ...]:
    """Run the forward again after the step."""
    return (_fix("recompute_forward", "changed", facts, ()),)


def detach_carried_state(facts: Facts, carrier: Carrier | None, shown: str | Message) -> tuple[Fix, ...]:
    """Cut the graph where the state is carried over; a ``retain_graph=True`` is then not needed."""
    found = None if carrier is None else cut(facts, carrier)
    lines = () if found is None else _as_lines(found[1], found[0])
    return (_fix("detach_carried_state", "changed", facts, lines, values={"bridge": shown}),)


def drop_retain_graph(facts: Facts) -> tuple[Fix, ...]:
    """Leave out ``retain_graph=True``, which the cut makes needless."""
    use = place(facts.conflict.use.site)
    if use is None or not facts.conflict.use.retain_graph:
        return ()
    lines = _as_lines(use, source.drop_keyword(use, "retain_graph"))
    return (_fix("drop_retain_graph", "changed", facts, lines),) if lines else ()


def update_outside_graph(facts: Facts) -> tuple[Fix, ...]:
    """Refresh statistics or buffers when no graph that uses them waits for its backward."""
    return (_fix("reorder_update", "preserved", facts, ()),)


def increment_or_name(facts: Facts) -> tuple[Fix, ...]:
    """Let gradsan see the write: deep mode, or a declared mutation."""
    return (_fix("find_writer", "preserved", facts, ()),)


def save_copy_in_hooks(facts: Facts) -> tuple[Fix, ...]:
    """Have the pack hook keep a copy instead of the tensor itself."""
    return (_fix("pack_a_copy", "preserved", facts, ()),)


def _fix(
    kind: str,
    meaning: Any,
    facts: Facts,
    lines: tuple[tuple[str, int, str], ...],
    values: dict[str, Any] | None = None,
) -> Fix:
    filled = {"name": facts.name, "op": facts.op, **(values or {})}
    return Fix(
        kind=kind,
        meaning=meaning,
        summary=Message(f"help.{kind}", filled),
        how_changed=Message(f"help.{kind}_how", filled) if meaning == "changed" else None,
        applicability="review" if lines else "manual",
        lines=lines,
    )


def _changes(writes: Iterable[Write], suggest: Any) -> tuple[tuple[str, int, str], ...]:
    lines: dict[tuple[str, int], tuple[str, int, str]] = {}
    seen: set[tuple[str, int]] = set()
    for write in writes:
        frame = _own_frame(write.site)
        if frame is None or (frame.file, frame.line) in seen:
            continue
        seen.add((frame.file, frame.line))
        for line in _as_lines(frame, suggest(frame, write.op)):
            lines[line[0], line[1]] = line
    return tuple(lines.values())


def _own_frame(site: Site) -> Frame | None:
    return site.user_frame


def _as_lines(frame: Frame, change: source.Change | None) -> tuple[tuple[str, int, str], ...]:
    return () if change is None else source.changed_lines(frame.file, change)
