"""Values read detached: the reads of one statement, and the values that it takes from an earlier one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from gradsan.model import Frame, Held
from gradsan.source.change import Change, Edit, edited, indentation_of
from gradsan.source.flow.calls import yielding_loop
from gradsan.source.flow.modules import Shape
from gradsan.source.flow.reaching import is_still_argument, reaching
from gradsan.source.flow.rounds import after_round, detach_after, shape_bound_at
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.identifiers import (
    assigned_names,
    bindings_in,
    bindings_of,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
    parameters,
)
from gradsan.source.intent.additions import value_detached
from gradsan.source.intent.conditions import is_conditional
from gradsan.source.locate import Statement, at_span, expression_at, frame_of, statement_at
from gradsan.source.methods import BACKWARDS, CUTTING, FUNCTIONS_MAKING_NEW, METADATA
from gradsan.source.rewrite.renewing import fresh_name
from gradsan.source.tree import SourceFile, header_nodes, read_source

_DEEPEST = 6
_CUTS = frozenset({"detach", "detach_"})
_NOT_VALUES = METADATA | CUTTING | {"backward", "data", "grad"}


def taken_from(taken: Frame, made: Frame) -> list[str]:
    """The names read at ``taken`` whose value the statement at ``made``, of the same function, has computed.

    Directly, or through statements between the two. Empty where the source is ambiguous.
    """
    reader, maker = statement_at(taken), statement_at(made)
    if reader is None or maker is None or reader.node is maker.node or reader.function is not maker.function:
        return []
    found = [name for name in consumed_names(reader) if _comes_from(name, reader, reader.node, maker.node, _DEEPEST)]
    own = _bound_to(made, maker)
    # ``real, fake = load(), net(z)``: who reads ``real`` alone has taken nothing of the network's.
    beside = set() if own is None else {one.name for one in bindings_of(maker.node)} - {own}
    return [own] if own in found else [name for name in found if name not in beside]


def detach_reads(frames: Sequence[Frame], names: Sequence[str]) -> Change | None:
    """The statement at ``frames`` with the reads of ``names`` detached: ``D(fake)`` becomes ``D(fake.detach())``.

    The reads by the operations at ``frames``, if any, else all of the statement: one that computes two losses
    reads a value for each. None where it reads none, binds a name itself in place, or its function differentiates one,
    or is given one by several calls: the loss of each would be cut off.
    """
    statement = statement_at(frames[0])
    if (
        statement is None
        or isinstance(statement.node, ast.AugAssign)
        or not _differentiated(statement).isdisjoint(names)
        or not _given_by_several(statement).isdisjoint(names)
    ):
        return None
    source = statement.source
    taking = [one.span for frame in frames if (one := expression_at(frame)) is not None]
    within = [] if len(taking) < len(frames) else taking
    edits: list[Edit] = []
    for name in names:
        reads = _edits_of_reads(source, statement.node, name)
        if reads is None:
            return None
        edits += [one for one in reads if any(span.contains(one.span) for span in within)] or reads
        edits += [Edit.after(source.span(one), ".detach()") for one in _given_alike(source, statement.node, name)]
    return edited(source, edits, "detach")


def _given_alike(source: SourceFile, node: ast.stmt, name: str) -> Iterator[ast.expr]:
    """What later statements of the block pass in the place of ``name`` to a function that runs a backward itself."""
    later = source.behind(node)
    functions = {one.name for one in source.nodes if isinstance(one, ast.FunctionDef) and _runs_backward(one)}
    for call in (one for one in header_nodes(node) if isinstance(one, ast.Call) and leaf_name(one.func) in functions):
        at = next((place for place, one in enumerate(call.args) if chain_key(one) == name), None)
        others = (one for other in later for one in header_nodes(other) if isinstance(one, ast.Call))
        alike = [one for one in others if at is not None and chain_key(one.func) == chain_key(call.func)]
        yield from (one.args[at] for one in alike if at is not None and len(one.args) > at and chain_key(one.args[at]))


def _runs_backward(function: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Call) and leaf_name(one.func) in BACKWARDS for one in ast.walk(function))


def detach_own_reads(frame: Frame) -> tuple[Change, tuple[str, ...]] | None:
    """The statement at ``frame`` with its reads of what it binds detached, ``s.h = f(x, s.h.detach())``, and the names.

    The names are those that outlive a call: attributes, elements, and variables of an outer scope that begin as
    tensors. None where it reads none, or a loop or a comprehension of its function repeats it.
    """
    statement = statement_at(frame)
    if statement is None or statement.loops or not isinstance(statement.node, ast.Assign):
        return None
    read = {chain_key(node) for node in ast.walk(statement.node.value)}
    names = tuple(
        one
        for one in assigned_names(statement.node)
        if one in read and (not one.isidentifier() or _begins_outside(statement, one))
    )
    change = detach_reads((frame,), names) if names else None
    return None if change is None else (change, names)


def detach_own_state(frame: Frame) -> tuple[Change, tuple[str, ...]] | None:
    """The attribute of ``self`` that the statement at ``frame`` reads and binds, detached for the next call; its name.

    In a line behind the statement. Where the method reads the state there, in the statement itself, if it is a tensor
    from the start. None for several states, or in a loop.
    """
    statement = statement_at(frame)
    if statement is None or statement.loops or not isinstance(statement.node, ast.Assign):
        return None
    read = {chain_key(node) for node in ast.walk(statement.node.value)}
    names = [one for one in assigned_names(statement.node) if one in read and re.fullmatch(r"self\.\w+", one)]
    if len(names) != 1:
        return None
    (name,) = names
    shape = shape_bound_at(frame, name) or "tensor"
    later = local_nodes(statement.function) if statement.function is not None else ()
    if not any(chain_key(one) == name and getattr(one, "lineno", 0) > statement.span.end_line for one in later):
        change = detach_after(frame, {name: shape})
    else:
        source, span = statement.source, statement.span
        nodes = ast.walk(source.owner_class(statement.node) or source.module)
        bound = bindings_in((node for node in nodes if isinstance(node, ast.Assign)), name)
        # ``if self.memory is None: self.memory = zeros``, before it.
        is_begun = any(
            source.function(one.statement) is statement.function and one.statement.lineno < span.line for one in bound
        )
        is_none = any(isinstance(one.value, ast.Constant) for one in bound) and not is_begun
        change = detach_reads((frame,), (name,)) if shape == "tensor" and not is_none else None
    return None if change is None else (change, (name,))


def detach_unread(made: Frame, attribute: str, files: Iterable[str]) -> Change | None:
    """``self.attribute = x.detach()`` in the function at ``made``, which keeps there what none of ``files`` reads."""
    statement = statement_at(made)
    if statement is None or statement.function is None:
        return None
    nodes = (one for one in local_nodes(statement.function) if isinstance(one, ast.Assign))
    kept = [one for one in nodes if [ast.unparse(target) for target in one.targets] == [f"self.{attribute}"]]
    sources = filter(None, map(read_source, {made.file, *files}))
    is_read = any(
        (isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Constant) and node.value == attribute)
        for source in sources
        for node in source.nodes
    )
    return value_detached(statement.source, kept[0].value) if len(kept) == 1 and not is_read else None


def _begins_outside(statement: Statement, name: str) -> bool:
    """Whether a variable is declared ``nonlocal`` or ``global``, and a tensor is made for it there."""
    declared = [] if statement.function is None else local_nodes(statement.function)
    kinds = [type(one) for one in declared if isinstance(one, ast.Global | ast.Nonlocal) and name in one.names]
    if not kinds or statement.function is None:
        return False
    outer = statement.source.function(statement.function) if kinds[0] is ast.Nonlocal else None
    values = [one.value for one in bindings_in(local_nodes(outer or statement.source.module), name)]
    making = FUNCTIONS_MAKING_NEW | {"tensor", "new_zeros", "new_ones", "new_full", "new_empty"}
    return bool(values) and all(isinstance(one, ast.Call) and leaf_name(one.func) in making for one in values)


def walked_values(frame: Frame) -> dict[str, frozenset[str | None]]:
    """The values of the variables of loops and comprehensions at ``frame`` that walk over displays of tuples.

    ``fake`` is ``a`` and ``b`` in ``for d, fake in ((da, a), (db, b))``, or over a variable bound to those tuples; None
    for an element that is no name.
    """
    statement = statement_at(frame)
    if statement is None or statement.scope is None:
        return {}
    inside = (one for one in ast.walk(statement.node) if isinstance(one, ast.comprehension))
    found: dict[str, frozenset[str | None]] = {}
    for walk in (*statement.loops, *inside):
        if isinstance(walk, ast.While) or not isinstance(walk.target, ast.Tuple):
            continue
        walked = walk.iter
        if isinstance(walked, ast.Name):
            values = [one.value for one in bindings_in(local_nodes(statement.scope), walked.id)]
            walked = values[0] if len(values) == 1 and isinstance(values[0], ast.expr) else walked
        rows = walked.elts if isinstance(walked, ast.Tuple | ast.List) else []
        cells = [one.elts for one in rows if isinstance(one, ast.Tuple | ast.List)]
        if not cells or any(len(one) != len(walk.target.elts) for one in cells) or len(cells) < len(rows):
            continue
        for position, variable in enumerate(walk.target.elts):
            if isinstance(variable, ast.Name):
                found[variable.id] = frozenset(chain_key(one[position]) for one in cells)
    return found


def is_repeated(frame: Frame, beside: Frame | None = None) -> bool:
    """Whether a loop of its function, or a comprehension, repeats the operation at ``frame``; True in doubt.

    The loops around ``beside``, in the same function, do not count; another call of the same name in them does.
    """
    found, other = expression_at(frame), None if beside is None else statement_at(beside)
    if found is None:
        return True
    repeating = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
    shared, functions = () if other is None else other.loops, (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = takewhile(
        lambda one: not isinstance(one, functions), (one for one, _ in found.source.ancestors(found.node))
    )
    alike = [one for loop in shared[-1:] for one in ast.walk(loop) if isinstance(one, ast.Call)]
    if isinstance(found.node, ast.Call) and any(
        leaf_name(one.func) == leaf_name(found.node.func) for one in alike if one is not found.node
    ):
        return True
    return any(isinstance(one, repeating) and one not in shared for one in inside)


def _given_by_several(statement: Statement) -> set[str]:
    """The arguments that the statement's function still has, where the file calls it at several places.

    A method may train what its own object has, whoever calls it.
    """
    function, source = statement.function, statement.source
    if not isinstance(function, ast.FunctionDef) or parameters(function)[:1] == ["self"]:
        return set()
    calls = [one for one in source.nodes if isinstance(one, ast.Call) and leaf_name(one.func) == function.name]
    given = parameters(function) if len(calls) > 1 else []
    return {one for one in given if is_still_argument(function.body, statement.node, one)}


def _differentiated(statement: Statement) -> set[str]:
    """The variables that calls of ``autograd.grad`` differentiate, or differentiate by: in a function, or for it.

    What a function of the file is given counts where it passes that on to ``grad``: ``force(energy(x), x)``.
    """
    nodes = [] if statement.scope is None else local_nodes(statement.scope)
    given = list(_given_to_grad(nodes))
    for function in (one for one in statement.source.nodes if isinstance(one, ast.FunctionDef)):
        passed = _keys(_given_to_grad(local_nodes(function)))
        calls = [one for one in nodes if isinstance(one, ast.Call) and leaf_name(one.func) == function.name]
        given += [value for call in calls if passed for name, value in arguments_of(function, call) if name in passed]
    return _keys(given)


def _given_to_grad(nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    for one in nodes:
        if isinstance(one, ast.Call) and leaf_name(one.func) == "grad":
            yield from (*one.args[:2], *(keyword.value for keyword in one.keywords))


def _keys(parts: Iterable[ast.expr]) -> set[str]:
    inside = (node for part in parts for node in ast.walk(part) if isinstance(node, ast.expr))
    return {key for node in inside if (key := chain_key(node)) is not None}


def _edits_of_reads(source: SourceFile, statement: ast.stmt, name: str) -> list[Edit] | None:
    """``.detach()`` after each read of ``name``; None where it is called."""
    edits: list[Edit] = []
    for node in header_nodes(statement):
        if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if chain_key(node) != name:
            continue
        parent, field = source.parents[node]
        if isinstance(parent, ast.Call) and field == "func":
            return None
        if isinstance(parent, ast.Attribute) and parent.attr in _NOT_VALUES:
            continue
        span = source.span(node)
        edits.append(Edit.after(span, ".detach()"))
    return edits


def _comes_from(name: str, reader: Statement, at: ast.stmt, maker: ast.stmt, depth: int) -> bool:
    if reader.scope is None or depth == 0:
        return False
    found = reaching(reader.scope.body, at)
    for key in (name, name.replace("[", ".").split(".")[0]):
        for definition in found.get(key, frozenset()):
            node = definition.statement
            if node is maker:
                return True
            if node is None or node is at or not any(one.name == key and one.computed for one in bindings_of(node)):
                continue
            if any(_comes_from(one, reader, node, maker, depth - 1) for one in consumed_names(node)):
                return True
    return False


def _bound_to(made: Frame, maker: Statement) -> str | None:
    """The name that gets the operation at ``made``: ``b`` for the second call of ``a, b = net(x), net(y)``."""
    node, computed = maker.node, expression_at(made)
    target, value = (node.targets[0], node.value) if isinstance(node, ast.Assign) else (None, None)
    if computed is None or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return None
    pairs = zip(target.elts, value.elts, strict=False)
    return next((chain_key(to) for to, of in pairs if maker.source.span(of).contains(computed.span)), None)


_OF_ELEMENT = re.compile(r"(?P<list>.+)\[\d+\]\.(?P<attribute>\w+)")


def detach_in_each(source: SourceFile, held: Sequence[Held]) -> tuple[str, str] | None:
    """A loop that detaches attributes of all objects of one list, and the list: the layers of a cache."""
    found: dict[str, dict[str, None]] = {}
    for one in held:
        place = _OF_ELEMENT.fullmatch(one.path)
        if place is None or not any((layer.path, layer.kind) == (place["list"], "list") for layer in one.around):
            return None
        found.setdefault(place["list"], {})[place["attribute"]] = None
    if len(found) != 1:
        return None
    (path, attributes), name = next(iter(found.items())), fresh_name(source, "part")
    parts = [f"{name}.{one}" for one in attributes]
    cut = f"{', '.join(parts)} = {', '.join(f'{one}.detach()' for one in parts)}"
    return path, f"for {name} in {path}:\n{indentation_of(source)}{cut}"


def detach_by_own(frames: Sequence[Frame], held: Sequence[Held]) -> tuple[Change, tuple[str, ...]] | None:
    """A call after the round of ``frames`` of the method by which the object that holds a value detaches it itself."""
    found: dict[str, str] = {}
    for one in held:
        for file, name in (layer.made_by for layer in one.around if layer.path == one.within):
            nodes = source.nodes if (source := read_source(file)) is not None else ()
            owners = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
            methods = [node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
            own = [node.name for node in methods if _detaches(node, f"self.{one.path.rpartition('.')[2]}")]
            found |= {f"{one.within}.{own[0]}()": one.path} if len(own) == 1 else {}
    change = after_round(frames, "\n".join(found), "detach") if found else None
    return None if change is None else (change, tuple(found.values()))


def _detaches(method: ast.FunctionDef, name: str) -> bool:
    """Whether a method that is given and returns nothing detaches ``name``: what it binds or changes in place."""
    if parameters(method) != ["self"] or any(isinstance(one, ast.Return) for one in ast.walk(method)):
        return False
    for node in (one for one in ast.walk(method) if isinstance(one, ast.Assign | ast.Expr)):
        calls = [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
        cut = [one.func.value for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in _CUTS]
        targets = assigned_names(node) if isinstance(node, ast.Assign) else map(chain_key, cut)
        if cut and name in targets:
            return True
    return False


def read_as_data(frame: Frame, name: str) -> tuple[str, Frame] | None:
    """What reads ``name`` as ``.data`` in the statement at ``frame``, ``model.scale.data``, and the place of that."""
    statement = statement_at(frame)
    nodes = [] if statement is None else [one for one in header_nodes(statement.node) if isinstance(one, ast.Attribute)]
    reads = [one for one in nodes if one.attr == "data" and isinstance(one.ctx, ast.Load)]
    own = [one for one in reads if leaf_name(one.value) == name.rpartition(".")[2]] or reads
    if statement is None or not own or len({ast.dump(one) for one in own}) > 1:
        return None
    return statement.source.text(own[0]), at_span(frame, statement.source.span(own[0]))


def detach_after_yield(
    bound_at: Frame, carried: Mapping[str, Shape], taken: Frame, used: Sequence[Frame]
) -> Change | None:
    """A line that detaches the names at the end of the loop in which a generator yields and binds them.

    Only where the backward, one of the frames ``used``, runs once for each value ``taken``: else the line would end the
    graph within a round.
    """
    statement, source_of = statement_at(bound_at), statement_at(taken)
    loop = None if statement is None else yielding_loop(statement)
    if statement is None or not isinstance(loop, ast.For | ast.While) or isinstance(loop.body[-1], ast.Continue):
        return None
    around = () if source_of is None else source_of.loops
    if source_of is not None and isinstance(source_of.node, ast.For):
        around = (source_of.node,)
    places = [statement_at(one) for one in used]
    at = [depth for depth, one in enumerate(places) if one is not None and one.loops and one.loops[-1] in around[-1:]]
    is_each = bool(at) and not any(map(is_conditional, used[at[-1] :]))
    return detach_after(frame_of(statement.source, loop.body[-1], bound_at), carried) if is_each else None
