"""Fixes for a backward into earlier graphs: values kept of earlier rounds or computed once, two losses of a forward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gradsan import heuristics, source
from gradsan.diagnose.names import shared_level
from gradsan.model import Bridge, Fix, Frame, Held, Lines, Message, Site


def forget_collected(used: Site, updated: Site | None, held: tuple[Held, ...]) -> Fix | None:
    """Clear, at the end of the round, the list with the values that earlier rounds have added; a replay keeps its own.

    ``used`` is the round's backward, ``updated`` its update, ``held`` the live variables that lead to an earlier round.
    None where no list among them still contains values added by that round.
    """
    for one in held:
        # The elements may be tuples: the log-probability and the value of each action.
        layers = one.around if one.is_old else ()
        kept = next((layer.path for layer in layers if layer.kind in ("list", "deque")), None)
        if kept is None:
            continue
        for frame in reversed(used.user_frames):
            is_global = one.function == "<module>" and one.file == frame.file
            if not _belongs(one, frame) and not (is_global and source.is_global_here(frame, _root(kept))):
                continue
            update = _update_beside(frame, updated)
            # ``kept = agent.moves``: the list is filled by its other name.
            made = source.definition_of(frame, kept) if kept.isidentifier() else None
            name = kept if made is None or not made.value.replace(".", "").isidentifier() else made.value
            if source.is_drawn_by_chance(frame, name):
                return detach_collected(held, of_any_length=True)
            found = source.forget_collected([frame] if update is None else [frame, update], name)
            if found is not None:
                values = {"name": name, "text": found[1]}
                return Fix.worded("help.forget_collected", values, source.changed_lines(frame.file, found[0]))
    return None


def detached(change: source.Change, names: Sequence[str], file: str) -> Fix:
    """The fix that detaches the state ``names`` by the changed line."""
    return Fix.worded("help.detach_carried_state", {"bridge": ", ".join(names)}, source.changed_lines(file, change))


def detach_collected(held: tuple[Held, ...], *, of_any_length: bool = False) -> Fix | None:
    """Append computed values without their graph to a list that outlives the rounds.

    None without a line that appends them. A list that every round reads again may be ``of_any_length``: a replay.
    """
    old = [one for one in held if one.is_old and one.within is not None]
    for file in dict.fromkeys(one.file for one in old):
        paths = [one.path for one in old if one.file == file]
        found = source.detach_collected(file, paths, of_any_length=of_any_length)
        if found is not None:
            return detached(*found, file)
    return None


def detach_held(
    used: Site, updated: Site | None, held: tuple[Held, ...], known: Sequence[str] = (), *, or_renewed: bool = False
) -> Fix | None:
    """Detach the values of earlier rounds in the live variables ``held``, by one line after the round.

    ``used`` is the round's backward, ``updated`` its update of the parameters. ``known`` are the variables for which
    the source shows a line already: that line stays unless the first of them holds containers that the source does
    not show, or the object or list that it is a part of carries others over, too. With ``or_renewed``, values with
    which this round has replaced an object's old ones count as kept, too. None where nothing is kept in an attribute
    or a container that the function of a backward's frame names.
    """
    for frame in reversed(used.user_frames):
        mine = [one for one in held if _belongs(one, frame) and (_is_kept(one) or (or_renewed and _in_object(one)))]
        if known:
            whole, own = known[0].rpartition("[")[0], [one for one in held if _belongs(one, frame)]
            beside = [one for one in own if _is_beside(one, known[0]) or (whole and one.within == whole)]
            mine = [one for one in mine if one.path.startswith(f"{known[0]}[") and _is_nested(one)]
            mine = mine or (beside if len(beside) > 1 and not {one.path for one in beside} <= {*known} else [])
            mine = mine or _of_like_objects(held, known[0])
        drawn = source.bound_each_round(frame.file, frame.line)  # a batch holds old values, and carries none over
        mine = [one for one in mine if _root(one.path) not in drawn]
        # If one attribute carries values over, so do the others of the same object.
        mine += [one for one in held if one not in mine and any(_is_beside(one, kept.path) for kept in mine)]
        if not mine:
            continue
        at = _update_beside(frame, updated)
        found = source.detach_held([frame] if at is None else [frame, at], mine)
        return None if found is None else detached(*found, frame.file)
    return None


def detach_by_own(used: Site, updated: Site | None, held: tuple[Held, ...]) -> Fix | None:
    """Call, after the round, the methods by which the objects that carry the values of earlier rounds detach them."""
    for frame in reversed(used.user_frames):
        at = _update_beside(frame, updated)
        found = source.detach_by_own([frame] if at is None else [frame, at], [x for x in held if _belongs(x, frame)])
        if found is not None:
            return detached(*found, frame.file)
    return None


def _is_kept(held: Held) -> bool:
    """Whether it outlives the round: an element that an earlier one has left, or an attribute rewritten each round."""
    return bool(held.around) and (held.is_old or (held.is_rewritten and held.container == "object"))


def _in_object(held: Held) -> bool:
    return any(layer.kind == "object" for layer in held.around)


def _is_beside(held: Held, known: str) -> bool:
    """Whether it is an attribute of the object that ``known`` belongs to, or ``known`` itself."""
    return held.container == "object" and held.within is not None and held.within == known.rpartition(".")[0]


def _of_like_objects(held: Sequence[Held], known: str) -> list[Held]:
    """The attribute of the name of ``known`` in all objects of one model, where several carry it: layers of a kind."""
    own = next((one for one in held if one.path == known and one.container == "object"), None)
    like = [
        one
        for one in held
        if own is not None
        and (one.file, one.function, one.container) == (own.file, own.function, "object")
        and (one.path.rpartition(".")[2], _root(one.path)) == (known.rpartition(".")[2], _root(known))
    ]
    return like if len(like) > 1 else []


def _root(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


def _is_nested(held: Held) -> bool:
    """Whether an element of the variable is not a tensor, so that a plain ``detach()`` of each would fail."""
    layers = [one for one in held.around if one.kind != "object"]
    return len(layers) > 1 or any(set(one.items) != {"tensor"} for one in layers)


def _belongs(held: Held, frame: Frame) -> bool:
    return held.file == frame.file and held.function.rpartition(".")[2] == frame.function.rpartition(".")[2]


def _update_beside(frame: Frame, updated: Site | None) -> Frame | None:
    """The frame of the update of the parameters in the function of ``frame``."""
    frames = () if updated is None else updated.user_frames
    return next((one for one in frames if source.in_same_function(one, frame)), None)


def _border(bridges: Sequence[Bridge]) -> tuple[Lines, tuple[str, ...]]:
    """The changed lines that detach all ``bridges``, and the names; no lines where one is ambiguous in the source."""
    lines: dict[tuple[str, int], str] = {}
    names: list[str] = []
    taking: dict[tuple[str, int], tuple[list[Frame], list[str]]] = {}
    changes: dict[tuple[str, int], source.Change] = {}
    for bridge in bridges:
        found = _cut(bridge)
        statement = None if found is None else source.statement_at(found[1])
        if found is None or statement is None:
            return (), ()
        name, frame, change = found
        key = (frame.file, statement.span.line)
        frames, read = taking.setdefault(key, ([], []))
        frames += _beside(bridge, frame) or [frame]
        read += [] if name in read else [name]
        # Reads of one statement for several operations are detached by one change.
        joined = source.detach_reads(frames, read) if len(frames) > 1 else None
        changes[key] = change if joined is None else joined
        names.append(name)
    for (wanted, _), change in changes.items():
        for file, line, text in source.changed_lines(wanted, change):
            if lines.setdefault((file, line), text) != text:
                return (), ()
    return tuple((file, line, text) for (file, line), text in lines.items()), tuple(dict.fromkeys(names))


def detach_other_network(bridges: Sequence[Bridge], retained_at: Site | None) -> tuple[Fix, ...]:
    """Detach the later loss from the network that it borrows, and drop ``retain_graph`` of the one backward between.

    None where nothing is borrowed, or the source does not show how to detach all of it.
    """
    lines, names = _border(bridges)
    if not lines:
        return ()
    kept = None if retained_at is None else retained_at.shown_frame
    dropped = source.changed_at(kept, lambda at: source.drop_keyword(at, "retain_graph"))
    taken = {(file, line) for file, line, _ in lines}
    values = {"name": ", ".join(names), "cut": ", ".join(f"{name}.detach()" for name in names)}
    alone = Fix.worded("help.detach_other_network", values, lines)
    fixes: list[Fix] = []
    if dropped and not any((file, line) in taken for file, line, _ in dropped):
        both = Message("help.detach_other_network_and_retain", values)
        fixes.append(replace(alone, summary=both, lines=(*lines, *dropped)))
    return (*fixes, alone)


def _cut(bridge: Bridge) -> tuple[str, Frame, source.Change] | None:
    for taken in bridge.taken_near:
        for made in bridge.made_near:
            if (given := _as_argument(taken.user_frames, made.user_frames)) is not None:
                return given
            for name, frame in _reads(taken.user_frames, made.user_frames, bridge.name):
                if _is_one_call(taken, made) and _is_of_argument(frame, name):
                    continue  # every loss that runs this module would be cut off
                if _holds_several(frame, name, bridge.name) or _is_object(taken.user_frames, frame, name):
                    continue  # a container: no line shows which of its tensors are another network's
                if _is_made_behind(bridge, frame, name):
                    continue
                change = source.detach_reads((frame,), (name,))
                if change is not None:
                    return name, frame, change
    return None


def _is_one_call(taken: Site, made: Site) -> bool:
    """Whether one call of a function made the tensor and took it: all frames but the last are the same."""
    stacks = ([(one.file, one.line) for one in site.user_frames] for site in (taken, made))
    return len(taken.user_frames) == len(made.user_frames) and len({(*stack[:-1],) for stack in stacks}) == 1


def _is_of_argument(frame: Frame, name: str) -> bool:
    """Whether a forward computes the value from its arguments alone: ``flat = x.view(len(x), -1)``."""
    bound = source.definition_of(frame, name)
    return frame.function.endswith(".forward") and bound is not None and "self." not in bound.value


def _is_made_behind(bridge: Bridge, frame: Frame, name: str) -> bool:
    """Whether the statement that binds ``name`` may have taken the tensor: detached, its other operands are, too."""
    if (bound := source.definition_of(frame, name)) is None:
        return False
    last = bound.frame.end_line or bound.frame.line

    def is_among(sites: Sequence[Site]) -> bool:
        frames = [one for site in sites for one in site.user_frames if source.in_same_function(one, bound.frame)]
        return any(bound.frame.line <= one.line <= last for one in frames)

    return is_among(bridge.taken_near) and not is_among(bridge.made_near)


def _beside(bridge: Bridge, frame: Frame) -> list[Frame]:
    """All calls of the statement at ``frame``, where it is not known which of many used the tensor."""
    # The calls before and after the one that made a Node are two.
    near = [one for taken in bridge.taken_near for one in taken.user_frames] if bridge.taken_near[2:] else []
    return [one for one in near if source.in_same_function(one, frame) and one.line == frame.line]


def _holds_several(frame: Frame, name: str, live: str | None) -> bool:
    """Whether ``name`` is a container: one that contains the live variable, or that the source constructs."""
    if live is not None and live.startswith((f"{name}[", f"{name}.")):
        return True
    shape = None if (made := source.definition_of(frame, name)) is None else source.shape_bound_at(made.frame, name)
    return shape not in (None, "tensor", "object")


def _is_object(taken: Sequence[Frame], frame: Frame, name: str) -> bool:
    """Whether the statement at ``frame`` calls a method of ``name`` that the user has written: it is no tensor."""
    within, statement = taken[taken.index(frame) + 1 :], source.statement_at(frame)
    called = f"{name}.{within[0].function.rpartition('.')[2]}(" if within else ""
    return statement is not None and bool(called) and called in statement.text


def _as_argument(taken: tuple[Frame, ...], made: tuple[Frame, ...]) -> tuple[str, Frame, source.Change] | None:
    """The statement that passes one function's result to another function: ``train(d, pool.query(fake))``."""
    level = shared_level(taken, made)
    if level < 0 or taken[level].line != made[level].line or min(len(taken), len(made)) <= level + 1:
        return None
    taker, maker = (stack[level + 1].function.rpartition(".")[2] for stack in (taken, made))
    found = source.detach_given(taken[level], taker, maker)
    return None if found is None else (found[0], taken[level], found[1])


def _reads(taken: tuple[Frame, ...], made: tuple[Frame, ...], live: str | None) -> Iterator[tuple[str, Frame]]:
    """The names read, and the reading statements on the way to the operation, of values computed at ``made``."""
    if (level := shared_level(taken, made)) < 0:
        return
    if taken[level].line == made[level].line:
        # ``fire(code=encoder(x))``: the function that reads it knows it as an argument.
        reader = source.statement_at(taken[-1]) if taken[level + 1 :] else None
        yield from ((name, taken[-1]) for name in (source.consumed_names(reader) if reader else ()) if name == live)
        return
    yield from (
        (name, taken[level])
        for name in sorted(source.taken_from(taken[level], made[level]), key=lambda name: name != live)
    )
    # An attribute bound by one method and read by its caller or another method: of one object, as far as names show.
    bound = {name for frame in made[level + 1 :] for name in source.bound_names(frame) if name.startswith("self.")}
    owner = source.method_receiver(made[level]) or "self"
    theirs = {f"{owner}{name.removeprefix('self')}" for name in bound}
    # Likewise for one method that is called again, for another part of the round.
    theirs |= {name for name in source.bound_names(made[level]) if name.startswith("self.")}
    for frame, wanted in [(taken[level], theirs), *((one, bound) for one in taken[level + 1 :])]:
        statement = source.statement_at(frame)
        read = [] if statement is None else source.consumed_names(statement)
        yield from ((name, frame) for name in read if name in wanted)
        yield from ((name, frame) for name, values in source.walked_values(frame).items() if values <= wanted)
    yield from _given(taken[level:], {*source.bound_names(made[level]), *((live,) if live else ())})


def _given(taken: tuple[Frame, ...], wanted: set[str]) -> Iterator[tuple[str, Frame]]:
    """The names by which functions called from the first of ``taken`` read the value that it calls ``wanted``."""
    for depth, frame in enumerate(taken[1:], 1):
        statement = source.statement_at(frame)
        for name in [] if statement is None else source.consumed_names(statement):
            outer: str | None = name
            for inner, caller in zip(taken[depth:0:-1], taken[depth - 1 :: -1], strict=True):
                outer = None if outer is None else source.callers_expression(outer, inner, caller)
            if outer in wanted:
                yield name, frame


@dataclass(frozen=True, slots=True)
class BuiltOnce:
    """The value ``name``, bound by the statement at ``bound_at``.

    ``made`` are the frames of the operation that made it, outermost first, ``used`` that of the later round's backward.
    ``is_trained``: the later loss trains what it was computed from in another way, too; ``is_nobodys``: nothing trains
    that, a target network. ``is_tensor``: the run shows that the name holds the tensor itself.
    """

    name: str | Message
    bound_at: Frame | None
    made: Sequence[Frame]
    used: Frame | None
    is_trained: bool = False
    is_nobodys: bool = False
    is_tensor: bool = False


def anew_or_cut(once: BuiltOnce) -> tuple[Fix, ...]:
    """Both fixes, the likelier one first; only the detach where the rounds compute the very same value themselves."""
    values = {"name": once.name}
    again = Fix.worded("help.build_each_round", values, kind="recompute_forward")
    without = _cuts(once, values)
    bound_at, used = once.bound_at, once.used
    is_twice = bound_at is not None and used is not None and source.is_computed_in_rounds(bound_at, used)
    if is_twice or any(map(source.copies_parameter, once.made[-1:])):
        # Both are compared, like old and new probabilities: recomputed, the old one would be the new one.
        return without
    if not isinstance(once.name, str):
        return again, *without
    holder = _holder_bound(once)
    is_cached = any(one.function.endswith("__init__") or source.is_filled_once(one) for one in once.made)
    is_stored = ("[" in once.name and holder is None and not is_cached) or _taken_out(once) is not None
    # What a loop has filled by parts, of networks that this loss trains anyway: a rollout.
    is_stored = is_stored or (once.is_trained and bound_at is not None and source.reads_filled(bound_at))
    if once.is_nobodys or is_stored or (bound_at is None and "." in once.name and holder is not None):
        # A part of a batch or a rollout, whose data would be computed again, too; or what a method has stored.
        return *without, again
    # A loss's target keeps its computed value; a name that suggests one puts the detach first, and a run decides.
    if bound_at is not None and used is not None and source.is_target_in_rounds(bound_at, used, once.name):
        return without
    is_named = heuristics.stays_as_computed(once.name)
    if is_named or once.is_trained:
        unsure = [
            replace(one, how_changed=Message("fix.stays_or_follows", {"how": one.how_changed}))
            for one in (again, *without)
        ]
        return (*unsure[1:], again) if is_named else tuple(unsure)
    # Nothing shows that the value is to stay: a line that takes its gradient is not suggested.
    return again, *(replace(one, lines=(), kind="no_grad") for one in without[:1])


def _cuts(once: BuiltOnce, values: dict[str, str | Message]) -> tuple[Fix, ...]:
    """The value detached; and where its statement binds others beside it, the statement under ``no_grad``."""
    cut, under = _cut_off(once), _under_no_grad(once)
    under = under if not cut or _gives_several(once) else ()
    pairs = (("help.build_without_graph", cut), ("help.build_under_no_grad", under))
    found = tuple(Fix.worded(key, values, lines, kind="detach_built_once") for key, lines in pairs if lines)
    return found or (Fix.worded("help.build_without_graph", values, kind="no_grad"),)


def _gives_several(once: BuiltOnce) -> bool:
    statement = None if once.bound_at is None else source.statement_at(once.bound_at)
    return statement is not None and len(source.assigned_names(statement)) > 1


def _cut_off(once: BuiltOnce) -> Lines:
    """The line that computes the value, or takes it out of a container, detached."""
    if not isinstance(once.name, str):
        return ()
    for frame in once.made:
        behind = None if once.used is None else source.detach_behind_loop(frame, once.used, once.name)
        if lines := source.changed_lines(frame.file, behind):
            return lines
    bound_at, shape = once.bound_at or _taken_out(once), "tensor" if once.is_tensor else None
    # Cut in the model's own forward, the rounds would not train it either.
    return (
        ()
        if bound_at is None or source.returns_to_several(bound_at)
        else source.changed_lines(bound_at.file, source.detach_at(bound_at, once.name, shape))
    )


def _taken_out(once: BuiltOnce) -> Frame | None:
    """The frame of ``soft = outputs[i]`` in the round's function, of a value that another function has computed."""
    if once.bound_at is not None or once.used is None or not isinstance(once.name, str):
        return None
    made = source.definition_of(once.used, once.name) if once.name.isidentifier() else None
    if made is None or not made.value.endswith("]") or made.value.startswith("["):
        return None
    # ``grad(loss, x)[0]`` computes here what it takes out.
    return None if any((one.file, one.line) == (made.frame.file, made.frame.line) for one in once.made) else made.frame


def _under_no_grad(once: BuiltOnce) -> Lines:
    """The statement that binds the value or its container (``grams`` of ``grams["b"]``), under ``no_grad``."""
    bound_at = once.bound_at or _holder_bound(once)
    is_several = bound_at is not None and source.returns_to_several(bound_at)
    return () if is_several else source.changed_at(bound_at, source.under_no_grad)


def _holder_bound(once: BuiltOnce) -> Frame | None:
    """The frame binding ``grams`` of ``grams["b"]``, ``self.grams`` before ``self``, ``batch`` of ``batch.value``."""
    if not isinstance(once.name, str):
        return None
    chain = once.name.partition("[")[0]
    own = [f"self.{chain.rpartition('.')[2]}"] if "." in chain else []  # of the method that filled ``penalty.anchor``
    found = (source.binding_of(once.made, one) for one in (chain, *own, chain.partition(".")[0]))
    return next((one for one in found if one is not None), None)
