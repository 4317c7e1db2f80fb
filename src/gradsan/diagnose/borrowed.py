"""Help for two losses that share a forward: the tensor between their networks, detached where one loss reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsan import source
from gradsan.diagnose.levels import place, shared_level, user_frames
from gradsan.model import Bridge, Fix, Frame, Message, Site

Lines = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class Border:
    """The changed lines that cut a loss off the other network, the names they cut, and the frames they stand at."""

    lines: Lines
    names: tuple[str, ...]


def border(bridges: Sequence[Bridge]) -> Border | None:
    """How to cut every one of ``bridges``; None where the source does not decide of one of them."""
    lines: dict[tuple[str, int], str] = {}
    names: list[str] = []
    for bridge in bridges:
        found = _cut(bridge)
        if found is None:
            return None
        name, frame, change = found
        for file, line, text in source.changed_lines(frame.file, change):
            if lines.setdefault((file, line), text) != text:
                return None
        names.append(name)
    if not lines:
        return None
    return Border(tuple((file, line, text) for (file, line), text in lines.items()), tuple(dict.fromkeys(names)))


def detach_other_network(bridges: Sequence[Bridge], retained_at: Site | None) -> tuple[Fix, ...]:
    """Cut the later loss off the network that it borrows; with it, ``retain_graph=True`` of the one backward between.

    None where nothing is borrowed, or the source does not decide how to cut all of it.
    """
    found = border(bridges)
    if found is None:
        return ()
    kept = None if retained_at is None else place(retained_at)
    change = None if kept is None else source.drop_keyword(kept, "retain_graph")
    dropped: Lines = () if change is None or kept is None else source.changed_lines(kept.file, change)
    taken = {(file, line) for file, line, _ in found.lines}
    values = {"name": ", ".join(found.names)}
    fixes: list[Fix] = []
    if dropped and not any((file, line) in taken for file, line, _ in dropped):
        fixes.append(_fix("help.detach_other_network_and_retain", (*found.lines, *dropped), values))
    fixes.append(_fix("help.detach_other_network", found.lines, values))
    return tuple(fixes)


def _fix(key: str, lines: Lines, values: dict[str, str]) -> Fix:
    how = Message("help.detach_other_network_how", values)
    return Fix("detach_other_network", "changed", Message(key, values), how, "review", lines)


def _cut(bridge: Bridge) -> tuple[str, Frame, source.Change] | None:
    for taken in bridge.taken_near:
        for made in bridge.made_near:
            if (given := _as_argument(user_frames(taken), user_frames(made))) is not None:
                return given
            for name, frame in _reads(user_frames(taken), user_frames(made), bridge.name):
                if bridge.name is not None and bridge.name.startswith((f"{name}[", f"{name}.")):
                    continue  # a container: which of its tensors are another network's, no line tells
                change = source.detach_reads(frame, name)
                if change is not None:
                    return name, frame, change
    return None


def _as_argument(taken: tuple[Frame, ...], made: tuple[Frame, ...]) -> tuple[str, Frame, source.Change] | None:
    """Where one statement hands what a function returns to another function: ``train(d, pool.query(fake))``."""
    level = shared_level(taken, made)
    if level < 0 or taken[level].line != made[level].line or min(len(taken), len(made)) <= level + 1:
        return None
    taker, maker = (stack[level + 1].function.rpartition(".")[2] for stack in (taken, made))
    found = source.detach_given(taken[level], taker, maker)
    return None if found is None else (found[0], taken[level], found[1])


def _reads(taken: tuple[Frame, ...], made: tuple[Frame, ...], live: str | None) -> Iterator[tuple[str, Frame]]:
    """The names, and the statements on the way to the taking operation, that read what the making one computed."""
    level = shared_level(taken, made)
    if level < 0 or taken[level].line == made[level].line:
        return
    yield from ((name, taken[level]) for name in _best(source.taken_from(taken[level], made[level]), live))
    # An attribute that a method bound and another method reads: of one object, as far as its name shows.
    bound = {name for frame in made[level + 1 :] for name in source.bound_names(frame) if name.startswith("self.")}
    for frame in taken[level + 1 :]:
        statement = source.statement_at(frame)
        read = [] if statement is None else source.consumed_names(statement)
        yield from ((name, frame) for name in read if name in bound)


def _best(names: list[str], live: str | None) -> list[str]:
    """What a live variable is called first."""
    return sorted(names, key=lambda name: name != live)
