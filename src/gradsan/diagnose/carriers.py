"""Carrier of a state into the next round: its name, its binding, and the line that detaches it after its round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeAlias

from gradsan import source
from gradsan.diagnose.collected import detached
from gradsan.diagnose.names import lifted, shared_level
from gradsan.model import Bridge, Fix, Frame, Held, Message, Site
from gradsan.source.methods import ADDING


@dataclass(frozen=True, slots=True)
class Carrier:
    """A state carried by ``name``; ``bound_at`` is the statement that binds it for the next round, where it is known.

    ``callers`` are the frames above the one that reads it. ``in_round`` has, for each name carried together with it,
    its name in the function at ``level`` of the backward's stack, which runs the round, and its binding.
    ``is_local`` says that it is bound in that very function. ``held`` are the live variables that lead to older graphs.
    ``behind`` are attributes that the round binds after its backward, each with the statement.
    """

    name: str
    bound_at: Frame | None = None
    callers: tuple[Frame, ...] = ()
    in_round: tuple[tuple[str, source.Carried], ...] = ()
    level: int = -1
    is_local: bool = True
    held: tuple[Held, ...] = ()
    behind: tuple[tuple[str, Frame], ...] = ()

    @property
    def names_in_round(self) -> tuple[str, ...]:
        """The names in the function that runs the round, its own first: ``swag.mean`` of ``self.mean``."""
        names = sorted(self.in_round, key=lambda pair: _with_double_quotes(pair[1].name) != self.name)
        return tuple(name for name, _ in names) or (self.name,)


@dataclass(frozen=True, slots=True)
class _Place:
    """A statement that may have read the carried tensor, the stack above it, and its depth."""

    frame: Frame
    stack: tuple[Frame, ...]

    @property
    def depth(self) -> int:
        return len(self.stack)


_Groups: TypeAlias = list[tuple[_Place, list[source.Carried]]]


def find(used: Site, bridge: Bridge) -> Carrier | None:
    """The carrier of the state, None where neither a live variable nor the source shows one; ``used`` is the backward.

    The candidates are the statements around the operation that used the tensor: first in the function that also runs
    the backward, then below it (where only variables that outlive a call can be carried), then above it. A live
    variable that holds the tensor itself decides between several names, then the statement that made it.
    """
    use = used.user_frames
    level, groups = _carrying(bridge.taken_near, use, bridge)
    if not groups:
        # An operation that saves nothing has no site of its own; the last save before it may be all that is known. Or
        # the round before has written the tensor into what carries it.
        level, groups = _carrying((*bridge.taken_near, used), use, bridge)
    groups = _without_own_methods(groups, bridge.made_near) or groups
    live = (group for group in groups if _holds(group, level, bridge.name))
    made = (group for group in groups if any(_was_made_at(one.bound_at, bridge.made_near) for one in group[1]))
    kept = (group for group in groups if any(_was_made_at(one.bound_at, bridge.taken_near) for one in group[1]))
    chosen = next(chain(live, made, kept, groups), None)
    if chosen is None:
        return _kept_behind(use, bridge) or (None if bridge.name is None else Carrier(bridge.name))
    place, carried = chosen
    known = (one for one in carried if _same(_in_round(one.name, place, level), bridge.name))
    first = next(known, None) or min(
        carried,
        key=lambda one: (
            not _was_made_at(one.bound_at, bridge.made_near),
            not _was_made_at(one.bound_at, bridge.taken_near),
        ),
    )
    together = {one.name: (other, one) for other, found in groups if other.stack == place.stack for one in found}
    names = ((_in_round(one.name, other, level), one) for other, one in together.values())
    in_round = tuple((_with_double_quotes(name), one) for name, one in names if name is not None)
    own = None if in_round else _kept_behind(use, bridge)
    return own or Carrier(
        _with_double_quotes(first.name),
        first.bound_at,
        place.stack,
        in_round,
        min(place.depth, level),
        place.depth <= level,
        bridge.held,
    )


def _kept_behind(use: tuple[Frame, ...], bridge: Bridge) -> Carrier | None:
    """The attributes of an object that a function binds which the round calls after its backward: a callback's own."""
    attributes = {one.path.rpartition(".")[2] for one in bridge.held if one.container == "object"}
    for stack in (site.user_frames for site in bridge.taken_near):
        level = shared_level(stack, use)
        is_behind = 0 <= level < len(use) and source.in_same_function(stack[level], use[level])
        for frame in reversed(stack[level + 1 :] if is_behind and stack[level].line > use[level].line else ()):
            bound = [
                (f"self.{one}", at)
                for one in sorted(attributes)
                for _, at in source.assignments(frame, f"self.{one}")
                if source.in_same_function(at, frame)
            ]
            if bound:
                return Carrier(", ".join(dict(bound)), bound[0][1], behind=tuple(bound))
    return None


def cut(used: Site, updated: Site | None, carrier: Carrier) -> tuple[source.Change, Frame] | None:
    """The changed line that detaches the carried state, with a frame of its file.

    Only values that the round no longer needs are detached: the line that binds the state where nothing of the round
    reads it afterwards, else a line of its own after the round's backward and update. A detach before the loss would
    stop the training of all that computed the state. ``used`` is the round's backward, ``updated`` its update of the
    parameters.
    """
    use = used.user_frames
    if carrier.behind:
        found = [source.detach_at(at, name) for name, at in carrier.behind]
        changes, at = [one for one in found if one is not None], carrier.behind[0][1]
        return (source.together(at.file, changes), at) if len(changes) == len(found) else None
    if not carrier.in_round and carrier.bound_at is not None and carrier.callers:
        shape = source.shape_bound_at(carrier.bound_at, carrier.name)
        carried: dict[str, source.Shape] = {carrier.name: shape or "tensor"}
        behind = source.detach_after_yield(carrier.bound_at, carried, carrier.callers[-1], use)
        return None if behind is None else (behind, carrier.bound_at)
    if not carrier.in_round or not 0 <= carrier.level < len(use):
        return None
    used_at = use[carrier.level]
    updated_at = _update_at(updated, use, carrier.level)
    if carrier.is_local and len(carrier.in_round) == 1:
        change = _at_binding(carrier, used_at)
        if change is not None:
            return change, carrier.in_round[0][1].bound_at
    shapes = dict[str, source.Shape]()
    for part, one in carrier.in_round:
        name = _tuple_around(part, carrier.held)
        shape = _shape(carrier, name, one)
        if shape is None or (part != one.name and _is_of_another(part, used_at, carrier.held)):
            return None
        shapes[name] = shape
    done = [used_at] if updated_at is None else [used_at, updated_at]
    taken = carrier.in_round[0][1].consumed_line
    last = max((one.bound_at for _, one in carrier.in_round), key=lambda frame: frame.line)
    if carrier.is_local and all(_follows_loop(one.bound_at, used_at) for _, one in carrier.in_round):
        behind = source.detach_after(last, shapes)
    elif any(name == source.method_receiver(used_at) for name in shapes):
        # A sum of losses: the round only runs its backward.
        behind = source.detach_after(used_at, shapes)
    elif updated_at is not None and carrier.is_local and updated_at.line < taken <= used_at.line:
        behind = source.detach_after(updated_at, shapes)
    else:
        behind = source.detach_after_round(done, shapes)
    return None if behind is None else (behind, used_at)


def cut_read(used: Site, taken: Sequence[Site], held: Sequence[Held]) -> Fix | None:
    """Detach the state where its next value is computed of it: ``s.hidden = cell(x, s.hidden.detach())``.

    For a state of one of many objects, which the function of the round does not name. ``used`` is the round's backward,
    ``taken`` are the sites that took the state. None where the round may run the statement several times.
    """
    use = used.user_frames
    for site in taken:
        stack = site.user_frames
        level = shared_level(stack, use)
        if not 0 <= level < len(stack) or source.runs_more_often(stack[level], use[level]):
            continue
        is_once = not source.is_repeated(stack[level], use[level]) and not any(
            map(source.is_repeated, stack[level + 1 :])
        )
        found = source.detach_own_reads(stack[-1]) if is_once else None
        attributes = {one.path.rpartition(".")[2] for one in held if one.container == "object"}
        names = () if found is None else (one for one in found[1] if not one.isidentifier())
        if found is not None and not {one.rpartition(".")[2] for one in names} <= attributes:
            # A trainer of a library runs the rounds: no frame of the program holds the object.
            found = source.detach_own_state(stack[-1]) if not held else None
        if found is not None and not any(source.begins_without_tensor(stack[-1].file, one) for one in found[1]):
            return detached(*found, stack[-1].file)
    return None


def cut_put_back(used: Site, held: Sequence[Held]) -> Fix | None:
    """Detach the state where the round puts it back into what it took it from: ``states[key] = state.detach()``."""
    for frame in reversed(used.user_frames):
        for one in (one for one in held if one.file == frame.file):
            name = re.split(r"[.\[]", one.path)[0]
            shape = "tensor" if one.path == name else _held_as(one, name)
            found = None if shape is None else source.put_back(frame, name, shape)
            if found is not None:
                return detached(found[1], (found[0],), frame.file)
    return None


def cut_term(
    fixes: tuple[Fix, ...], updated: Site | None, carrier: Carrier | None, made: Sequence[Site]
) -> tuple[Fix, ...]:
    """``fixes``, which detach a state that is a term of the loss, after one that recomputes it for the next round.

    Once detached, no loss trains its computation: for the value of the previous state in an actor-critic, nothing
    is learned. Where the source does not show how it was computed, words say so. Unchanged for an average, which
    ``made`` adds to: run again, it would be updated twice.
    """
    frames = [frame for site in made for frame in site.user_frames]
    # Of an average's first round, only the line that carries it on shows what it is.
    frames += [] if carrier is None or carrier.bound_at is None else [carrier.bound_at]
    if carrier is None or any(map(source.reads_what_it_binds, frames)):
        return fixes
    # An object or a container: more is done with the value than its name shows.
    is_within = any(one.path.startswith((f"{carrier.name}.", f"{carrier.name}[")) for one in carrier.held)
    found = None
    if carrier.bound_at is not None and updated is not None and not is_within:
        found = source.run_again_for_state(carrier.name, carrier.bound_at, updated.user_frames)
    values = {"bridge": carrier.name, "value": carrier.name if found is None else found[0]}
    cut = tuple(replace(one, how_changed=Message("help.cut_term_how", values)) for one in fixes)
    if found is not None:
        return (Fix.worded("help.recompute_term", values, found[1], kind="recompute_forward"), *cut)
    if cut and cut[0].lines:
        return cut
    return (Fix.worded("help.recompute_kept", values, kind="recompute_forward"), *cut)


def _shape(carrier: Carrier, name: str, one: source.Carried) -> source.Shape | None:
    """The kind of value of ``name``: from the file, else from its live value; None for tensors nested deeper."""
    known = source.shape_bound_at(one.bound_at, one.name)
    live = {shape for held in carrier.held for path in (name, one.name) if (shape := _held_as(held, path)) is not None}
    if not live and any(_is_mixed(held, path) for held in carrier.held for path in (name, one.name)):
        return None
    if known is not None:
        # The file shows the outer kind, a live value also that of the elements.
        deeper = [shape for shape in live if shape.startswith(f"{known}/")]
        return deeper[0] if len(live) == len(deeper) == 1 else known
    if len(live) == 1:
        return live.pop()
    kinds = {held.container for held in carrier.held if held.within in (name, one.name)}
    for shape in ("list", "tuple", "dict", "defaultdict"):
        if kinds == {shape}:
            return shape
    is_inside = any(held.path.startswith((f"{name}[", f"{name}.")) for held in carrier.held)
    return None if kinds or is_inside else "tensor"


def _tuple_around(name: str, held: Sequence[Held]) -> str:
    """The tuple that ``name`` is an item of, which no statement can bind; else ``name``."""
    container = name.rpartition("[")[0]
    tuples = {_with_double_quotes(layer.path) for one in held for layer in one.around if layer.kind == "tuple"}
    return container if _with_double_quotes(container) in tuples else name


def _is_of_another(name: str, used_at: Frame, held: Sequence[Held]) -> bool:
    """Whether variables of the function lead to the attribute, but none does by ``name``: it is a layer's."""
    attribute = name.rpartition(".")[2]
    own = [one for one in held if one.function.rpartition(".")[2] == used_at.function.rpartition(".")[2]]
    paths = [one.path for one in own if re.search(rf"\.{re.escape(attribute)}\b", one.path)]
    return bool(paths) and not any(_same(name, path) for path in paths)


def _held_as(held: Held, name: str) -> source.Shape | None:
    """The kind of value of ``name``, if it leads to ``held``; for ``states[stream]`` an element's of ``states``."""
    paths = [layer.path for layer in held.around]
    if name.endswith("]"):
        container = name.rpartition("[")[0]
        layers = held.around[paths.index(container) + 1 :] if container in paths else None
    else:
        layers = held.around[paths.index(name) :] if name in paths else None
    if layers is None:
        return None
    kinds = [*(layer.kind for layer in layers), "tensor"]
    is_plain = all(set(one.items) == {inner} for one, inner in zip(layers, kinds[1:], strict=True))
    shape = "/".join(kinds[:-1]) or "tensor"
    return shape if shape in source.DETACHED and is_plain else None


def _is_mixed(held: Held, name: str) -> bool:
    """Whether ``name`` is a container with other elements than tensors, too: a count beside the states."""
    return any(
        layer.path == name and layer.kind != "object" and set(layer.items) != {"tensor"} for layer in held.around
    )


def _follows_loop(bound_at: Frame, used_at: Frame) -> bool:
    """Whether the binding stands behind a loop of the same function that contains the backward."""
    is_behind = source.in_same_function(bound_at, used_at) and bound_at.line > used_at.line
    return is_behind and not source.runs_more_often(bound_at, used_at) and source.runs_more_often(used_at, bound_at)


def _at_binding(carrier: Carrier, used_at: Frame) -> source.Change | None:
    name, one = carrier.in_round[0]
    bound = one.bound_at
    if not source.in_same_function(bound, used_at):
        return None
    if bound.line < used_at.line and source.is_read_between(one.name, bound, used_at):
        return None
    shape = _shape(carrier, name, one)
    return None if shape is None else source.detach_at(bound, one.name, shape)


def _update_at(updated: Site | None, use: tuple[Frame, ...], level: int) -> Frame | None:
    """The frame at which the function at ``level`` of the backward's stack made the update, or called its function."""
    update = updated.user_frames if updated is not None else ()
    return update[level] if update and shared_level(update, use) >= level else None


def _carrying(sites: Sequence[Site], use: tuple[Frame, ...], bridge: Bridge) -> tuple[int, _Groups]:
    """The same as ``_groups`` without names that hold plain numbers."""
    level, groups = _groups(sites, use, bridge.made_near)
    states = (
        (at, [one for one in some if _in_round(one.name, at, level) not in bridge.numbers]) for at, some in groups
    )
    return level, [(place, found) for place, found in states if found]


def _groups(sites: Sequence[Site], use: tuple[Frame, ...], made_near: tuple[Site, ...]) -> tuple[int, _Groups]:
    """The level of the function that runs the backward, and the places that read a carried value, best first."""
    places = list(_places(sites))
    level = max((shared_level((*place.stack, place.frame), use) for place in places), default=-1)
    in_order = sorted(places, key=lambda place: (_distance(place.depth, level), place.depth))
    at = use[level] if 0 <= level < len(use) else None
    return level, [(place, found) for place in in_order if (found := _carried_at(place, level, at, made_near))]


def _places(sites: Iterable[Site]) -> Iterator[_Place]:
    """All statements on the stack of a single site, or on the path from the first site to the second."""
    stacks = [site.user_frames for site in sites]
    if not stacks:
        return
    first, last = stacks[0], stacks[-1]
    shared = shared_level(first, last)
    for depth, frame in enumerate(first):
        if len(stacks) > 1 and depth == shared:
            between = source.frames_between(frame, last[depth]) or [frame]
            yield from (_Place(one, first[:depth]) for one in between)
        else:
            yield _Place(frame, first[:depth])
    for depth, frame in enumerate(last):
        if len(stacks) > 1 and depth > shared:
            yield _Place(frame, last[:depth])


def _distance(depth: int, level: int) -> int:
    return depth - level if depth >= level else 1_000 + level - depth


def _carried_at(place: _Place, level: int, used_at: Frame | None, made_near: tuple[Site, ...]) -> list[source.Carried]:
    """The names bound by an earlier round that the statement reads; of several bindings the tensor's."""
    found = source.carried_names(place.frame, used_at)
    is_part = used_at is not None and not source.in_one_loop(place.frame, used_at)
    if place.depth > level or is_part:
        # A call is a round, and a loop within it only a part of one: ``for x in chunk: loss = loss + f(x)``. An object
        # that the call was given may carry a state all the same.
        found = [
            one for one in found if not source.dies_with_call(place.frame, one.name, given_stays=place.depth <= level)
        ]
    found = [one for one in found if not source.is_item_of_loop(one.bound_at, one.name)]

    def likelihood(one: source.Carried) -> tuple[bool, bool]:
        # What begins the state (``reset``, ``begin``) may bind it too; each round runs its own binding.
        is_of_round = used_at is not None and source.in_same_function(one.bound_at, used_at)
        return _was_made_at(one.bound_at, made_near), is_of_round

    return list({one.name: one for one in sorted(found, key=likelihood)}.values())


def _without_own_methods(groups: _Groups, made_near: tuple[Site, ...]) -> _Groups:
    """The groups without names that only a method of the user's own has bound: what it binds itself says more."""
    kept = ((place, [one for one in found if not _is_own_method(one.bound_at, made_near)]) for place, found in groups)
    return [(place, found) for place, found in kept if found]


def _is_own_method(bound_at: Frame, sites: Sequence[Site]) -> bool:
    """Whether what looks like adding to a container, ``self.memory.update(x)``, ran a method of the user's own."""
    return any(
        source.in_same_function(outer, bound_at)
        and bound_at.line <= outer.line <= (bound_at.end_line or bound_at.line)
        and inner.function.rpartition(".")[2] in ADDING
        for site in sites
        for outer, inner in pairwise(site.user_frames)
    )


def _was_made_at(bound_at: Frame, made_near: tuple[Site, ...]) -> bool:
    """Whether the statement that binds a name also made the tensor on the bridge."""
    frames = [frame for site in made_near for frame in site.user_frames] if len(made_near) == 1 else []
    last = bound_at.end_line or bound_at.line
    return any(source.in_same_function(frame, bound_at) and bound_at.line <= frame.line <= last for frame in frames)


def _in_round(name: str, place: _Place, level: int) -> str | None:
    return name if place.depth <= level else lifted(name, (*place.stack, place.frame), max(level, 0))


def _holds(group: tuple[_Place, list[source.Carried]], level: int, live: str | None) -> bool:
    place, carried = group
    return any(_same(_in_round(one.name, place, level), live) for one in carried)


def _with_double_quotes(name: str) -> str:
    return name if '"' in name else name.replace("'", '"')


def _same(name: str | None, live: str | None) -> bool:
    """Whether ``live``, the path of a live variable, is ``name`` or a part of it."""
    if name is None or live is None:
        return False
    plain, path = name.replace("'", '"'), live.replace("'", '"')
    return path == plain or path.startswith((f"{plain}[", f"{plain}."))
