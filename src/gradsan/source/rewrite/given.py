"""What a file gives an optimizer: its networks, its list of parameters; where it steps; updates without a gradient."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradsan.model import Frame, Lines
from gradsan.source.change import Change, Edit, edited_lines, insert_before, with_keyword
from gradsan.source.identifiers import assigned_pairs, dotted_path, is_name, leaf_name, parameters, standing_of
from gradsan.source.locate import call_at, expression_at, statement_at
from gradsan.source.methods import has_attribute
from gradsan.source.tree import FunctionNode, SourceFile


def networks_of(source: SourceFile, optimizer: str) -> set[str]:
    """The networks that an optimizer was given: ``net`` of ``Adam(net.parameters())``."""
    calls = (
        part.func for _, value in _made(source, optimizer) for part in ast.walk(value) if isinstance(part, ast.Call)
    )
    return {ast.unparse(one.value) for one in calls if isinstance(one, ast.Attribute) and one.attr == "parameters"}


def switch_on_before_made(frame: Frame, optimizer: str) -> Change | None:
    """``head.requires_grad_(True)`` before the one statement that makes ``optimizer`` of the parameters of ``head``."""
    statement = statement_at(frame)
    made = [] if statement is None else _made(statement.source, optimizer)
    networks = set() if statement is None else networks_of(statement.source, optimizer)
    if statement is None or len(made) != 1 or len(networks) != 1:
        return None
    return insert_before(statement.source, made[0][0], f"{networks.pop()}.requires_grad_(True)", "switch_on")


def have_a_common_part(some: set[str], others: set[str]) -> bool:
    """Whether one of some networks is one of the others, a part of one, or has one as a part."""
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in some for b in others)


def parameters_of(source: SourceFile, optimizer: str, at: ast.AST, each: str = "p") -> str:
    """An expression for the list of an optimizer's parameters, to be used at ``at``; ``each`` is a free name.

    ``list(net.parameters())`` where the file shows that the optimizer has those of one network alone, and that its name
    means the same network at ``at``; else a list over its groups.
    """
    network = _only_network(source, optimizer, at)
    if network is not None:
        return f"list({network}.parameters())"
    return f'[{each} for group in {optimizer}.param_groups for {each} in group["params"]]'


def stepped_optimizer(source: SourceFile, node: ast.stmt) -> str | None:
    """``opt`` of a statement that is just ``opt.step()``, or ``scaler.step(opt)`` with what scales losses in the file.

    For other calls of a ``step`` (with a closure, of a schedule) it is their receiver; None for other statements.
    """
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return None
    is_scaled = len(call.args) == 1 and not call.keywords and source.text(call.func.value) in scalers_of(source)
    return source.text(call.args[0] if is_scaled else call.func.value)


def steps_schedule_of(source: SourceFile, node: ast.stmt, optimizer: str) -> bool:
    """Whether a statement steps a schedule that the file makes for ``optimizer``: ``schedule.step()``."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    made = (value for _, value in _made(source, source.text(call.func.value)) if isinstance(value, ast.Call))
    return any(source.text(given) == optimizer for value in made for given in value.args[:1])


def scalers_of(source: SourceFile) -> set[str]:
    """What scales losses in a file and steps optimizers: ``scaler`` of ``scaler.scale(loss)``, ``scaler.step(opt)``."""
    calls = (one for one in source.nodes if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    called = {(source.text(one.func.value), one.func.attr) for one in calls if isinstance(one.func, ast.Attribute)}
    return {owner for owner, method in called if method == "scale" and (owner, "step") in called}


def may_step(made: Frame, at: Frame) -> bool:
    """Whether the file of ``at``, or of ``made``, where an optimizer is made, has a call that steps it by its name.

    Of an optimizer that has never stepped, such a call waits for a condition, or for a function to be called.
    """
    making = statement_at(made)
    sources = {one.source.file: one.source for one in (making, statement_at(at)) if one is not None}
    stepped = {
        leaf_name(one)
        for source in sources.values()
        for call in source.nodes
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "step"
        for one in (call.func.value, *call.args)
    }
    bound = [] if making is None else _names_of_made(making.node, made)
    return bool(bound) and all(not names.isdisjoint(stepped) for names in bound)


_COPYING = frozenset({"clone", "detach", "copy", "cat", "stack", "view", "reshape", "flatten", "ravel", "squeeze"})


def is_function_of_leaves(frame: Frame) -> bool:
    """Whether the value bound at a frame is computed from leaves that are trained alone: ``self.log_alpha.exp()``.

    Not where it only copies them.
    """
    statement = statement_at(frame)
    value = None if statement is None else getattr(statement.node, "value", None)
    if statement is None or not isinstance(value, ast.expr):
        return False
    source = statement.source
    operands, computes, waiting = list[ast.expr](), False, [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            computes = computes or leaf_name(node.func) not in _COPYING
            waiting += [*node.args, *(one.value for one in node.keywords)]
            is_method = isinstance(node.func, ast.Attribute) and standing_of(source, node.func.value) != "namespace"
            waiting += [node.func.value] if is_method and isinstance(node.func, ast.Attribute) else []
            operands += [] if isinstance(node.func, ast.Attribute) else [node.func]
        elif isinstance(node, ast.BinOp | ast.UnaryOp):
            computes = computes or isinstance(node, ast.BinOp)
            waiting += [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        elif not isinstance(node, ast.Constant):
            operands.append(node)
    texts = {ast.unparse(one) for one in operands}
    return computes and bool(texts) and all(_is_trained_leaf(source, one) for one in texts)


def copies_parameter(frame: Frame) -> bool:
    """Whether the operation at a frame gives the values of one parameter of several: ``w.clone()``, ``w * 1.0``."""
    found = expression_at(frame)
    node = None if found is None else found.node
    operand = node.left if isinstance(node, ast.BinOp) else getattr(getattr(node, "func", None), "value", None)
    if found is None or node is None or not isinstance(operand, ast.Name):
        return False
    if isinstance(node, ast.BinOp):
        same = _NEUTRAL.get(type(node.op))
        if same is None or not isinstance(node.right, ast.Constant) or node.right.value != same:
            return False
    elif not isinstance(node, ast.Call) or leaf_name(node.func) != "clone":
        return False
    around = [one for one, _ in found.source.ancestors(node)]
    loops = [one for one in around if isinstance(one, ast.For)]
    made = [part for one in around for part in getattr(one, "generators", ())]
    return any(
        is_name(part, operand.id) and has_attribute(one.iter, "parameters", "named_parameters")
        for one in (*loops, *made)
        for part in ast.walk(one.target)
    )


_NEUTRAL = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.Div: 1}


def _is_trained_leaf(source: SourceFile, name: str) -> bool:
    values = [ast.unparse(value) for _, value in _made(source, name)]
    is_made = bool(values) and all(re.search(r"requires_grad|Parameter\b", one) for one in values)
    return is_made and not any(re.search(r"requires_grad(=|_\()False", one) for one in values)


def _names_of_made(node: ast.stmt, made: Frame) -> list[set[str | None]]:
    """The names of what an assignment binds to the value that is made at a frame; nothing where that does not show.

    Several sets are what it may be: Python 3.10 knows no columns, and a line may make several values.
    """
    if not isinstance(node, ast.Assign):
        return []
    (target, *others), value = node.targets, node.value
    if isinstance(target, ast.Tuple) and not others:
        pairs = list(zip(target.elts, value.elts, strict=False)) if isinstance(value, ast.Tuple) else []
        place = (made.line, made.column)
        found = [one for one, given in pairs if (given.lineno, made.column and given.col_offset + 1) == place]
        return [_names_in(one) for one in found if not isinstance(one, ast.Tuple)]
    return [set[str | None]().union(*map(_names_in, (target, *others)))] if not isinstance(target, ast.Tuple) else []


def _names_in(target: ast.expr) -> set[str | None]:
    return {leaf_name(part) for part in ast.walk(target)} - {None, "self"}


def steps_one_of(at: Frame) -> bool:
    """Whether the step at a frame is of one optimizer among several: an element, a choice, what a loop goes through."""
    step = statement_at(at)
    calls = [] if step is None else [one.func for one in ast.walk(step.node) if isinstance(one, ast.Call)]
    held = [one.value for one in calls if isinstance(one, ast.Attribute) and one.attr == "step"]
    if step is None or len(held) != 1:
        return False
    if isinstance(held[0], ast.Subscript | ast.IfExp | ast.Call):
        return not (isinstance(held[0], ast.Subscript) and isinstance(held[0].slice, ast.Constant))
    return isinstance(held[0], ast.Name) and _is_one_of(step.source, held[0])


def _is_one_of(source: SourceFile, name: ast.Name) -> bool:
    """Whether a name is a loop's, a parameter, or bound by a choice or an element."""
    function = source.function(name)
    if function is not None and name.id in parameters(function):
        return True
    for node in source.nodes:
        if isinstance(node, ast.For | ast.comprehension):
            if any(isinstance(part, ast.Name) and part.id == name.id for part in ast.walk(node.target)):
                return True
        elif isinstance(node, ast.Assign) and source.function(node) is function:
            is_choice = isinstance(node.value, ast.IfExp | ast.Subscript | ast.Name)
            if is_choice and source.text(node.targets[0]) == name.id:
                return True
    return False


def _only_network(source: SourceFile, optimizer: str, at: ast.AST) -> str | None:
    made = _made(source, optimizer)
    value = made[0][1] if len(made) == 1 else None
    if not isinstance(value, ast.Call) or any(_adds_group(node) for node in source.nodes):
        return None
    given = value.args[0] if value.args else next((one.value for one in value.keywords if one.arg == "params"), None)
    if not isinstance(given, ast.Call) or not isinstance(given.func, ast.Attribute) or given.func.attr != "parameters":
        return None
    network, names = given.func.value, [optimizer]
    if given.args or given.keywords or dotted_path(source, network) is None:
        return None
    names.append(source.text(network))
    if all(name.startswith("self.") for name in names):
        own = source.owner_class(made[0][0])
        is_same = own is not None and own is source.owner_class(at)
        return names[1] if is_same and _times_bound(source, names[1]) == 1 else None
    is_kept = all(_means_the_same(source, name, made[0][0], at) for name in names)
    return names[1] if is_kept else None


def _means_the_same(source: SourceFile, name: str, there: ast.AST, here: ast.AST) -> bool:
    """Whether a name, or attributes of one, is the same object at both places: bound once, in a scope of both."""
    root = name.partition(".")[0]
    if root != name and _times_bound(source, name):
        return False
    outer, inner = source.function(there), source.function(here)
    if any(isinstance(node, (ast.Global, ast.Nonlocal)) and root in node.names for node in source.nodes):
        return False
    if outer is not None and outer is not inner:
        return False
    own = 0 if inner is None else _times_bound_in(source, root, inner)
    if outer is not None and own:
        return own == 1
    return not own and _times_bound_in(source, root, None) == 1


def _times_bound_in(source: SourceFile, name: str, scope: FunctionNode | None) -> int:
    """How often a function binds a name, as a parameter, too; of the module where ``scope`` is None."""
    stored = sum(source.function(node) is scope for node in _bindings(source) if source.text(node) == name)
    return stored + (0 if scope is None else parameters(scope).count(name))


def _times_bound(source: SourceFile, name: str) -> int:
    return sum(source.text(node) == name for node in _bindings(source))


def _made(source: SourceFile, optimizer: str) -> list[tuple[ast.Assign, ast.expr]]:
    """The assignments that bind the name of an optimizer, with the value of each, an element of a tuple perhaps."""
    nodes = (one for one in source.nodes if isinstance(one, ast.Assign))
    return [(one, given) for one in nodes for name, given in assigned_pairs(one) if source.text(name) == optimizer]


def _adds_group(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "add_param_group"


def _bindings(source: SourceFile) -> Iterator[ast.expr]:
    """The names and attributes that the file binds; parameters of functions are no expressions of it."""
    for node in source.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def kept_without_gradient(frame: Frame) -> Lines:
    """``allow_unused=True`` in the call of ``autograd.grad`` at ``frame``, and ``p if g is None else p - lr * g``.

    Where the gradients are read in one loop or comprehension over ``zip(…)`` alone, and there in one such difference.
    """
    statement, found = statement_at(frame), call_at(frame, "grad")
    if statement is None or found is None:
        return ()
    source, call = found
    argument = with_keyword(source, call, "allow_unused", "True")
    update = _update_of(source, statement.node, call)
    if argument is None or update is None:
        return ()
    difference, kept, gradient = update
    text = f"{kept} if {gradient} is None else {source.text(difference)}"
    return edited_lines(source, [argument, Edit(source.span(difference), text)])


def _update_of(source: SourceFile, node: ast.stmt, call: ast.Call) -> tuple[ast.expr, str, str] | None:
    """The difference, and the names of what is updated and of its gradient."""
    given: ast.expr = call
    scope: ast.AST = source.function(node) or source.module
    if isinstance(node, ast.Assign) and node.value is call:
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            return None
        name = node.targets[0].id
        reads = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == name and one is not given]
        reads = [one for one in reads if isinstance(one.ctx, ast.Load)]
        if len(reads) != 1:
            return None
        given = reads[0]
    pairs = source.parents[given][0]
    if not isinstance(pairs, ast.Call) or leaf_name(pairs.func) != "zip" or given not in pairs.args:
        return None
    around = source.parents[pairs][0]
    if not isinstance(around, ast.comprehension | ast.For) or around.iter is not pairs:
        return None
    target = around.target
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(pairs.args):
        return None
    gradient = target.elts[pairs.args.index(given)]
    if not isinstance(gradient, ast.Name):
        return None
    inside = source.parents[around][0] if isinstance(around, ast.comprehension) else around
    reads = [
        one
        for one in ast.walk(inside)
        if isinstance(one, ast.Name) and one.id == gradient.id and isinstance(one.ctx, ast.Load)
    ]
    others = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} - {gradient.id}
    if len(reads) != 1:
        return None
    difference = source.parents[reads[0]][0]
    while isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Mult):
        difference = source.parents[difference][0]
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        return None
    kept, place = difference.left, source.parents[difference][0]
    is_alone = isinstance(place, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.Call | ast.Assign)
    if not isinstance(kept, ast.Name) or kept.id not in others or not is_alone or not _is_value(place, difference):
        return None
    return difference, kept.id, gradient.id


def _is_value(place: ast.AST, difference: ast.expr) -> bool:
    """Whether the difference is all that ``place`` binds, collects or is made of."""
    if isinstance(place, ast.DictComp):
        return place.value is difference
    if isinstance(place, ast.ListComp | ast.GeneratorExp):
        return place.elt is difference
    if isinstance(place, ast.Call):
        return difference in place.args and leaf_name(place.func) == "append"
    return isinstance(place, ast.Assign) and place.value is difference
