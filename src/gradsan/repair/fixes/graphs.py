"""Separate graphs: a forward run again, in every round where it was run once."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gradsan.heuristics import draws_batch
from gradsan.model import Diagnosis, Fix, Label, Message
from gradsan.repair.fixes import _blocks as blocks
from gradsan.repair.fixes import kept_values
from gradsan.repair.fixes._kept_parts import own_attribute
from gradsan.source.change import Edit, changed_lines, text_with
from gradsan.source.flow.bindings import method_receiver
from gradsan.source.flow.calls import returns_to_several
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.methods import CUTTING
from gradsan.source.rewrite.given import is_function_of_leaves
from gradsan.source.rewrite.moving import is_whole_lines, names_read
from gradsan.source.rewrite.renewing import constructs, draws_again, run_again, run_again_for_next_round
from gradsan.source.rewrite.suggest import detach_at
from gradsan.source.tree import SourceFile


def _updates(diagnosis: Diagnosis) -> tuple[Label, ...]:
    """The labels of updates to parameters that an earlier forward read; of the freed graph if it was freed as well."""
    if diagnosis.cause in blocks.STEPPED:
        return blocks.labels(diagnosis, "written")
    is_updated = any(one.message.key == "label.updated_between" for one in blocks.labels(diagnosis, "note"))
    return blocks.labels(diagnosis, "freed") if diagnosis.cause == blocks.SHARED and is_updated else ()


def recompute_forward(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Repeat the assignments between the save and the write that the loss depends on; else all that it depends on."""
    used = blocks.first(diagnosis, "used")
    saved = blocks.first(diagnosis, "saved")
    is_other = diagnosis.cause in _OTHER_UPDATES
    written = blocks.labels(diagnosis, "written") if is_other else _updates(diagnosis)
    if used is None or not written:
        return ()
    # What is computed before the update would need its old values.
    written += tuple(one for one in blocks.labels(diagnosis, "note") if one.message.key == "label.updated_between")
    words = "recompute_after_change" if is_other else "recompute_forward"
    places = [blocks.user_frames(one) for one in written]
    found = run_again(None if saved is None else blocks.user_frames(saved), places, blocks.user_frames(used))
    if not found and saved is not None and not is_other:
        found = run_again_for_next_round(blocks.user_frames(saved), places, blocks.user_frames(used))
    return tuple(blocks.fix("recompute_forward", lines, words) for lines in found)


_OTHER_UPDATES = frozenset({"input_changed_between_passes", "statistics_updated"})
_REBUILT_CAUSES = blocks.STEPPED | {"graph_built_once", "same_loss_twice", "input_not_in_graph", blocks.SHARED}


_SEVERAL = 2
UPDATED, CUT_ONCE = "label.updated_between", "help.build_without_graph"


def rebuild_in_loop(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Compute the values that the loop reads within it: moved there, as a property, or without a cache."""
    used = blocks.first(diagnosis, "used")
    if used is None or diagnosis.cause not in _REBUILT_CAUSES:
        return ()
    silent = blocks.advice(diagnosis, "compute_each_round")
    is_once = diagnosis.cause == "graph_built_once" and silent is None
    if is_once and all(one.kind != "recompute_forward" for one in diagnosis.fixes):
        return ()
    found: list[Fix] = []
    notes = blocks.labels(diagnosis, "note")
    begun = next((one for one in notes if one.message.key == "label.built_once_before"), None)
    is_of_loop = diagnosis.cause == "input_not_in_graph"
    for made in blocks.labels(diagnosis, "bridge", "created" if silent is not None or is_of_loop else "saved"):
        if is_of_loop:
            # What the loss is computed from is what the rounds change: made anew, they would begin again.
            found += [one for one in islice(_moved(made, used, begun, ()), 1) if one is not None]
            continue
        updated = [one for one in diagnosis.labels if one.role == "written" or one.message.key == UPDATED]
        for fix in (
            *_moved(made, used, begun, updated),
            _into_function(made, used, begun),
            _computed_where_read(made, begun),
            # Where several networks have stepped, other values of the same forward are as old.
            kept_values.as_property(made) if len(updated) < _SEVERAL else None,
            kept_values.without_cache(made),
        ):
            if fix is not None and fix not in found:
                found.append(fix if silent is None else replace(fix, kind=silent.kind))
    return tuple(found)


def cut_once(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Detach a value that was computed before the rounds, where the diagnosis has it in words alone: not unasked."""
    words = next((one for one in diagnosis.fixes if one.summary.key == CUT_ONCE), None)
    name = None if words is None else words.summary.values.get("name")
    if words is None or words.lines or not isinstance(name, str):
        return ()
    how = Message("fix.stays_or_follows", {"how": words.how_changed})
    for label in blocks.labels(diagnosis, "bridge", "created", "saved"):
        if is_function_of_leaves(label.frame):
            return ()  # another form of the parameter that is trained, and no target
        lines = changed_lines(label.frame.file, detach_at(label.frame, name))
        if lines and not returns_to_several(label.frame):
            is_others = any(one.kind == "detach_other_network" for one in diagnosis.fixes)
            kind = "detach_other_network" if is_others else "detach_built_once"
            return (replace(words, kind=kind, lines=lines, how_changed=how),)
    return ()


def _moved(made: Label, used: Label, begun: Label | None, updated: Sequence[Label]) -> Iterator[Fix | None]:
    """The statements from ``made`` on, or from one before it: that at ``begun``, where the freed graph begins.

    They are put into the innermost loop that also has one of the updates at ``updated``: each of its rounds needs its
    own.
    """
    pair = blocks.in_one_block(made, used)
    loop = None if pair is None or pair[0].index >= pair[1].index else _loop_of(pair[1].statement)
    if pair is None or loop is None:
        return
    loop = _innermost(loop, used, updated)
    begins = _begins_before(pair[0], begun)
    if begins is not None:
        yield _put_into(begins, loop, "rebuild_in_loop", pair[1].statement, needed=pair[0].statement)
        return
    starts = [pair[0], _start_of(pair[0])]
    if method_receiver(used.frame) in blocks.names_bound(pair[0].statement):
        starts.reverse()  # the loss itself: what it was computed from has been freed with it
    for first in starts:
        yield (
            None
            if first is None
            else _put_into(first, loop, "rebuild_in_loop", pair[1].statement, needed=pair[0].statement)
        )


def _begins_before(made: blocks.Placed, begun: Label | None) -> blocks.Placed | None:
    """The earlier statement of the same block with which the freed graph begins."""
    places = blocks.placements(begun) if begun is not None else ()
    return next((one for one in places if one.block is made.block and one.index < made.index), None)


def _innermost(loop: ast.For | ast.While, used: Label, updated: Sequence[Label]) -> ast.For | ast.While:
    """The innermost loop within ``loop``, or that itself, that contains the backward and an update."""
    place, inside = statement_at(used.frame), set(ast.walk(loop))
    frames = [frame for label in updated for frame in label.site.user_frames if frame.file == used.frame.file]
    for inner in reversed(place.loops if place is not None else ()):
        lines = range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
        if isinstance(inner, ast.For | ast.While) and inner in inside and any(one.line in lines for one in frames):
            return inner
    return loop


def _loop_of(node: ast.stmt) -> ast.For | ast.While | None:
    """The loop that a statement is, or the one loop of a ``try`` or ``with`` block."""
    while isinstance(node, ast.Try | ast.With):
        inner = [one for one in node.body if isinstance(one, ast.For | ast.While | ast.Try | ast.With)]
        if len(inner) != 1:
            return None
        node = inner[0]
    return node if isinstance(node, ast.For | ast.While) else None


def _start_of(made: blocks.Placed) -> blocks.Placed | None:
    """The first statement of the block that the one at ``made`` is computed from; None where there is none."""
    needed, first, given = blocks.names_read([made.statement]), None, _given(made)
    for index in range(made.index - 1, -1, -1):
        node = made.block[index]
        computes = isinstance(node, ast.Assign) and blocks.names_bound(node) & needed
        if computes and not constructs(made.source, node):
            needed |= blocks.names_read([node])
            first = first if node in given else replace(made, statement=node, index=index)
    return first


def _given(made: blocks.Placed) -> set[ast.stmt]:
    """The assignments before ``made`` in its block that make leaves, or data of data: run again, they give others."""
    imports = (node for node in made.source.nodes if isinstance(node, ast.Import | ast.ImportFrom))
    data = {one.asname or one.name.partition(".")[0] for node in imports for one in node.names} | set(dir(builtins))
    found: set[ast.stmt] = set()
    for node in made.block[: made.index]:
        is_leaf = re.search(r"requires_grad|Parameter\b", blocks.text_of(made.source, node)) is not None
        # An object that is constructed may be a network: what is computed with it is no data.
        is_plain = isinstance(node, ast.Assign) and not is_leaf and not constructs(made.source, node)
        is_data = is_plain and not names_read([node]) - data
        found |= {node} if is_leaf or is_data else set()
        data = data | blocks.names_bound(node) if is_data else data - blocks.names_bound(node)
    return found


def _into_function(made: Label, used: Label, begun: Label | None) -> Fix | None:
    """The same for a function defined beside the forward that runs the backward, or that what runs it calls."""
    place = next(blocks.placements(used), None)
    if place is None:
        return None
    closure = place.source.function(place.statement)
    for first in blocks.placements(made):
        later = first.block[first.index + 1 :]
        running = [closure] if closure is not None else [one for one in later if place.statement in ast.walk(one)]
        names = blocks.names_read(running)
        called = [one for one in later if isinstance(one, ast.FunctionDef) and one.name in names]
        begins, start = _begins_before(first, begun), _start_of(first)
        # What the loss itself was computed from has been freed with it, and so has what the function reads, too.
        earlier = set[str]() if start is None else blocks.names_bound(start.statement) & names
        is_freed = bool(earlier) or method_receiver(used.frame) in blocks.names_bound(first.statement)
        starts = [begins] if begins is not None else [start, first] if is_freed else [first]
        for function in (closure, *called) if isinstance(closure, ast.FunctionDef) else called:
            around = next((one for one in later if function in ast.walk(one)), None)
            for one in starts if around is not None else ():
                fix = one and _put_into(one, function, "rebuild_in_function", around, first.statement)
                if isinstance(fix, Fix):
                    return fix
    return None


def _put_into(
    first: blocks.Placed,
    loop: ast.For | ast.While | ast.FunctionDef,
    words: str,
    around: ast.stmt | None = None,
    needed: ast.stmt | None = None,
) -> Fix | None:
    """The statement ``first``, and those that depend on it, at the start of ``loop``.

    ``around`` is the later statement of the same block that contains the loop; None where it is the loop itself.
    ``needed`` must be among them. None where they draw a batch or random numbers, which the rest of the round shares,
    or advance a state.
    """
    around = around or loop
    source, index = first.source, first.block.index(around)
    if first.index >= index or loop.body[0].lineno == loop.lineno:
        return None
    between = first.block[first.index : index]
    # The iterable of a ``for`` is evaluated before its first iteration.
    read = [*loop.body, loop.test] if isinstance(loop, ast.While) else loop.body
    moving = _depending(between, blocks.names_read(read))
    if not moving or not all(_bound(node) and is_whole_lines(source, node) for node in moving):
        return None
    if any(constructs(source, node) for node in moving) or (needed is not None and needed not in moving):
        return None
    if first.statement is not needed and draws_again(one for node in moving for one in ast.walk(node)):
        return None
    calls = (one for node in moving for one in ast.walk(node) if isinstance(one, ast.Call))
    names = [leaf_name(one.func) or "" for one in calls]
    if _is_state(moving) or any(name == "next" or draws_batch(name) for name in names):
        return None
    bound = set().union(*map(_bound, moving))
    # Where they are read first: what stands before may change what they are computed from.
    start = loop.body.index(_first_after_docstring(loop))
    reading = next((one for one in loop.body[start:] if blocks.names_read([one]) & bound), loop.body[start])
    body = source.span(reading)
    indent = source.indent(body)
    text = "\n".join(textwrap.indent(textwrap.dedent(blocks.text_of(source, node)), indent) for node in moving)
    changes = {body.line: f"{text}\n{source.lines[body.line - 1]}"}
    # Names read elsewhere in between, or after a loop that may not run, keep their original definition as well.
    others = [node for node in first.block[first.index :] if node not in moving and node is not around]
    mine = set(ast.walk(loop))
    others += [node for node in ast.walk(around) if isinstance(node, ast.Expr | ast.Assign) and node not in mine]
    if not blocks.names_read(others) & bound:
        for node in moving:
            changes |= blocks.removed(source, node)
    return blocks.fix("recompute_forward", blocks.lines_changed(source, changes), words)


def _first_after_docstring(loop: ast.For | ast.While | ast.FunctionDef) -> ast.stmt:
    is_documented = isinstance(loop, ast.FunctionDef) and ast.get_docstring(loop, clean=False) is not None
    return loop.body[1] if is_documented and len(loop.body) > 1 else loop.body[0]


def _depending(between: list[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """The first of the statements and those that depend on it, if ``wanted`` names are computed by them.

    A value that the program detaches is to stay as it was computed.
    """
    hanging, tainted = [], set[str]()
    for position, node in enumerate(between):
        if position and isinstance(between[0], ast.Expr) and ".parameters()" in ast.unparse(node):
            continue  # an optimizer has the object, and not what its method has computed
        if position == 0 or (blocks.names_read([node]) & tainted and not _is_detached(node, tainted)):
            hanging.append(node)
            tainted |= _bound(node)
    needed = set(wanted)
    chosen: list[ast.stmt] = []
    for node in reversed(hanging):
        if _bound(node) & needed:
            chosen.append(node)
            needed |= blocks.names_read([node])
    return chosen[::-1]


def _is_detached(node: ast.stmt, names: set[str]) -> bool:
    """Whether an assignment reads all of the names without their graph: ``w = 1 / residual.detach().norm()``."""
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    cut = {part for one in calls if getattr(one.func, "attr", None) in CUTTING for part in ast.walk(one)}
    reads = {one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in names}
    return isinstance(node, ast.Assign) and bool(reads) and reads <= cut


def _is_state(moving: Sequence[ast.stmt]) -> bool:
    """Whether the statements compute a variable from its old value (``h = cell(x, h)``), which they would advance."""
    bound = set().union(*map(_bound, moving))
    for node in moving:
        if isinstance(node, ast.Assign) and blocks.names_read([node]) & bound:
            return True
        bound -= _bound(node)
    return False


def _bound(node: ast.stmt) -> set[str]:
    """The names that an assignment binds; of ``main.set_weights(hyper(z))``, the object whose method is called."""
    call = node.value if isinstance(node, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) else None
    if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name):
        return {method.value.id}
    return blocks.names_bound(node) if isinstance(node, ast.Assign) else set()


def _computed_where_read(made: Label, begun: Label | None) -> Fix | None:
    """Attributes that the constructor computes, or ``self.fold()`` does there, computed where a method reads them."""
    for place in blocks.placements(made):
        source, constructor = place.source, place.source.function(place.statement)
        owner = source.owner_class(place.statement)
        if owner is None or not isinstance(constructor, ast.FunctionDef) or constructor.name != "__init__":
            continue
        place = _begins_before(place, begun) or place
        methods = [one for one in owner.body if isinstance(one, ast.FunctionDef)]
        computing = [one for one in methods if one.name == _own_call(place.statement)]
        moving = [place.statement] if computing else _hanging(place.block[place.index :])
        if len(moving) == len(place.block) or any(constructs(source, one) for one in moving):
            return None
        if draws_again(node for one in (*computing, *moving) for node in ast.walk(one)):
            return None
        bound = _stored(*computing, *moving)
        reading = [
            one
            for one in methods
            if one not in (*computing, constructor) and any(own_attribute(node) in bound for node in ast.walk(one))
        ]
        # Of several that read it, forward is the one that each round runs first.
        reading = [one for one in reading if one.name == "forward"] if len(reading) > 1 else reading
        texts, stores = _said_again(source, constructor, moving)
        if len(reading) != 1 or not texts or not all(is_whole_lines(source, one) for one in moving):
            return None
        reads = (one for one in reading[0].body if any(own_attribute(node) in bound for node in ast.walk(one)))
        first = next(reads)
        if first.lineno == reading[0].lineno or _receiver(reading[0]) != _receiver(constructor):
            return None
        line, changes = source.span(first).line, kept_values.unread(source, constructor, _receiver(constructor), moving)
        for one in moving:
            changes |= blocks.removed(source, one)
        if stores:
            changes[source.span(moving[0]).line] = f"{source.indent(moving[0])}{stores}"
        changes[line] = "\n".join([*(f"{source.indent(first)}{text}" for text in texts), source.lines[line - 1]])
        return blocks.fix("recompute_forward", blocks.lines_changed(source, changes), "rebuild_in_function")
    return None


def _stored(*nodes: ast.AST) -> set[str | None]:
    """The attributes of ``self`` that ``nodes`` bind."""
    inside = (one for node in nodes for one in ast.walk(node))
    return {own_attribute(one) for one in inside if isinstance(getattr(one, "ctx", None), ast.Store)} - {None}


def _hanging(block: list[ast.stmt]) -> list[ast.stmt]:
    """The first statement, and the later ones that are computed from what it binds."""
    found, names, attributes = block[:1], blocks.names_bound(block[0]), _stored(block[0])
    for node in block[1:]:
        if names_read([node]) & names or any(own_attribute(one) in attributes for one in ast.walk(node)):
            found.append(node)
            names, attributes = names | blocks.names_bound(node), attributes | _stored(node)
    return found


def _said_again(source: SourceFile, constructor: ast.FunctionDef, moving: list[ast.stmt]) -> tuple[list[str], str]:
    """The text of each statement in another method, and the line that keeps arguments for it; empty where it cannot."""
    own, bound = _receiver(constructor), blocks.names_bound(constructor)
    given = {one.arg for one in ast.walk(constructor.args) if isinstance(one, ast.arg)} - bound - {own}
    kept = kept_values.kept_arguments(source, constructor, own, given)
    needed = names_read(moving) - set[str]().union(*map(blocks.names_bound, moving))
    missing = sorted(needed & given - kept.keys())
    known = {one.attr for one in source.nodes if isinstance(one, ast.Attribute) and leaf_name(one.value) == own}
    is_known = not (needed - kept.keys()) & bound and not known & set(missing)
    if not is_known or not all(isinstance(one, ast.Assign) or _own_call(one) for one in moving):
        return [], ""
    kept |= {one: f"{own}.{one}" for one in missing}
    texts = []
    for one in moving:
        reads = (node for node in ast.walk(one) if isinstance(node, ast.Name) and node.id in kept)
        texts.append(text_with(source, source.span(one), [Edit(source.span(node), kept[node.id]) for node in reads]))
    return texts, f"{', '.join(kept[one] for one in missing)} = {', '.join(missing)}" if missing else ""


def _own_call(node: ast.stmt) -> str | None:
    """``fold`` of a statement that is just ``self.fold()``."""
    call = node.value if isinstance(node, ast.Expr) else None
    return own_attribute(call.func) if isinstance(call, ast.Call) and not (call.args or call.keywords) else None


def _receiver(function: ast.FunctionDef) -> str:
    return next((one.arg for one in function.args.args), "")
