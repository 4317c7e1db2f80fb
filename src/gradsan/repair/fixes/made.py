"""Objects made so that they do not train: layers in a plain list, an old optimizer's scheduler, a missing part."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.identifiers import assigned_names, imported_as, leaf_name
from gradsan.source.imports import torch_name
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.moving import is_whole_lines
from gradsan.source.tree import SourceFile, Span

_LISTS = (ast.List, ast.ListComp)
_DICTS = (ast.Dict, ast.DictComp)
_HELD = re.compile(r"(?P<owner>.*?)\.(?P<attribute>\w+)\[(?P<key>[^\]]*)\](?P<rest>.*)")


def register_container(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``nn.ModuleList([…])`` for the list, or dict, in which a module keeps layers or parameters."""
    advice = blocks.advice(diagnosis, "give_parameters")
    held = _HELD.match(_name(diagnosis))
    if advice is None or advice.summary.key != "help.give_unregistered" or held is None:
        return ()
    attribute, is_dict = held["attribute"], held["key"][:1] in "'\""
    kind = f"{'Parameter' if not held['rest'] else 'Module'}{'Dict' if is_dict else 'List'}"

    found: list[tuple[SourceFile, ast.expr]] = []
    for source in blocks.user_sources(diagnosis):
        found += [(source, value) for value in _bound_to_attribute(source, attribute) if _is_plain(value, is_dict)]
    return _registered(advice, found, kind, attribute, _contents, "register_container")


def register_parameter(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``nn.Parameter(…)`` for the tensor that a module keeps as a plain attribute."""
    advice = blocks.advice(diagnosis, "give_parameters")
    name = _name(diagnosis)
    attribute = name.rpartition(".")[2]
    if advice is None or advice.summary.key != "help.give_unregistered" or attribute == name or "[" in attribute:
        return ()
    found = [
        (source, value)
        for source in blocks.user_sources(diagnosis)
        for value in _bound_to_attribute(source, attribute)
        if isinstance(value, ast.Call) and leaf_name(value.func) != "Parameter"
    ]
    return _registered(advice, found, "Parameter", attribute, _plain_leaf, "register_parameter")


def _registered(
    advice: Fix,
    found: Sequence[tuple[SourceFile, ast.expr]],
    kind: str,
    attribute: str,
    inside: Callable[[SourceFile, ast.expr], str],
    words: str,
) -> tuple[Fix, ...]:
    """``nn.KIND(…)`` around the one value that the attribute is bound to; ``inside`` is the text in its brackets."""
    if len(found) != 1:
        return ()
    source, value = found[0]
    module = _nn_in(source)
    change = edited(source, [Edit(source.span(value), f"{module}.{kind}({inside(source, value)})")], "give_parameters")
    lines = changed_lines(source.file, change)
    values = dict(advice.summary.values) | {"container": f"{module}.{kind}", "attribute": f"self.{attribute}"}
    return (blocks.fix("give_parameters", lines, words, **values),) if lines else ()


def _contents(source: SourceFile, value: ast.expr) -> str:
    """The source of a list or dict, or of the comprehension; "" for an empty one."""
    is_empty = isinstance(value, ast.Call) or not (getattr(value, "elts", None) or getattr(value, "keys", None))
    is_empty = is_empty and not isinstance(value, ast.ListComp | ast.DictComp)
    return "" if is_empty else source.slice(source.span(value))


def _plain_leaf(source: SourceFile, value: ast.expr) -> str:
    """The call that makes a leaf, without the ``requires_grad`` that a Parameter has by default."""
    if not isinstance(value, ast.Call):
        return source.text(value)
    func = value.func
    if isinstance(func, ast.Attribute) and func.attr == "requires_grad_":
        return source.text(func.value)
    span, last = source.span(value), value.keywords[-1] if value.keywords else None
    before = [*value.args, *(one.value for one in value.keywords[:-1])]
    if last is None or last.arg != "requires_grad" or not before:
        return source.slice(span)
    end, kept = source.span(last.value), max(map(source.span, before), key=lambda one: (one.end_line, one.end_column))
    tail = source.slice(Span(end.end_line, end.end_column, span.end_line, span.end_column))
    return source.slice(Span(span.line, span.column, kept.end_line, kept.end_column)) + tail


def _name(diagnosis: Diagnosis) -> str:
    return (diagnosis.tensor.name if diagnosis.tensor is not None else None) or ""


def _bound_to_attribute(source: SourceFile, attribute: str) -> Iterator[ast.expr]:
    for node in source.nodes:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        own = [one for one in targets if isinstance(one, ast.Attribute) and one.attr == attribute]
        if own and isinstance(own[0].value, ast.Name) and source.owner_class(node) is not None:
            yield node.value


def _is_plain(value: ast.expr, is_dict: bool) -> bool:
    if isinstance(value, ast.Call):
        return leaf_name(value.func) == ("dict" if is_dict else "list") and not value.args and not value.keywords
    return isinstance(value, _DICTS if is_dict else _LISTS)


def _nn_in(source: SourceFile) -> str:
    """The file's name for ``torch.nn``."""
    return imported_as(source, "torch.nn") or f"{torch_name(source)}.nn"


def give_forgotten(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The parameters of the missing part, added to the optimizer where it is made."""
    advice, made = blocks.advice(diagnosis, "give_parameters"), blocks.first(diagnosis, "created")
    if advice is None or made is None or advice.summary.key != "help.give_parameters":
        return ()
    for place in blocks.placements(made):
        source = place.source
        calls = [one for one in ast.walk(place.statement) if isinstance(one, ast.Call) and one.args]
        own = [one for one in calls if source.span(one).line == made.frame.line and _takes_parameters(one.args[0])]
        if own:
            given = _given(own[0].args[0], _name(diagnosis))
            edit = None if given is None else _added(source, own[0].args[0], *given)
            change = None if edit is None else edited(source, [edit], "give_parameters")
            lines = changed_lines(source.file, change)
            values = dict(advice.summary.values) | {"given": "" if given is None else given[0]}
            return (blocks.fix("give_parameters", lines, "give_forgotten", **values),) if lines else ()
    return ()


def _takes_parameters(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Call) and leaf_name(one.func) == "parameters" for one in ast.walk(value))


def _given(value: ast.expr, name: str) -> tuple[str, bool] | None:
    """The object that contains ``name``, as deep as those passed already, and whether it is a module."""
    calls = (one for one in ast.walk(value) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    known = [ast.unparse(one.func.value) for one in calls if one.func.attr == "parameters"]  # type: ignore[attr-defined]
    parts = name.split(".")
    if len(parts) == 1:
        return (name, False) if name.isidentifier() else None
    # ``self`` may be a trainer, which has no parameters itself.
    part = ".".join(parts[: max(min(one.count(".") + 1 for one in known), 1 + (parts[0] == "self"))])
    return None if part in known or part == name or "[" in part else (part, True)


def _added(source: SourceFile, value: ast.expr, part: str, is_module: bool) -> Edit | None:
    span, text = source.span(value), source.slice(source.span(value))
    each = f"*{part}.parameters()" if is_module else part
    if isinstance(value, ast.List) and value.elts:
        is_groups = isinstance(value.elts[-1], ast.Dict)
        group = f"{part}.parameters()" if is_module else f"[{part}]"
        last = source.span(value.elts[-1])
        added = f'{{"params": {group}}}' if is_groups else each
        return Edit.after(last, f", {added}")
    if isinstance(value, ast.BinOp):
        return Edit(span, f"{text} + [{each}]")
    if isinstance(value, ast.Call):
        return Edit(span, f"[*{text}, {each}]")
    return None


def schedule_anew(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """The scheduler created again after the optimizer that steps, or passed that one if it is made earlier."""
    advice, made = blocks.advice(diagnosis, "schedule_anew"), blocks.first(diagnosis, "created")
    notes = {one.message.key: one for one in blocks.labels(diagnosis, "note")}
    other = notes.get("label.other_optimizer")
    scheduler = None if made is None else _binding(made)
    optimizer = None if other is None else _binding(other)
    if advice is None or scheduler is None or optimizer is None or scheduler[0] is not optimizer[0]:
        return ()
    source, scheduling, _ = scheduler
    _, optimizing, name = optimizer
    call = scheduling.value
    given = next(iter(call.args), None) if isinstance(call, ast.Call) else None
    if given is None or not is_whole_lines(source, scheduling) or not is_whole_lines(source, optimizing):
        return ()
    span, argument = source.span(scheduling), source.span(given)
    if optimizing.lineno < scheduling.lineno:
        change = edited(source, [Edit(argument, name)], "schedule_anew")
        lines = changed_lines(source.file, change)
    else:
        own = source.function(scheduling)
        if own is not None and own is not source.function(optimizing):
            return ()
        before = source.slice(Span(span.line, span.column, argument.line, argument.column))
        after = source.slice(Span(argument.end_line, argument.end_column, span.end_line, span.end_column))
        at = source.span(optimizing)
        indent = source.indent(at)
        text = f"{source.lines[at.end_line - 1]}\n{indent}{before}{name}{after}"
        gone = {} if _is_read_before(source, scheduling, optimizing) else blocks.removed(source, scheduling)
        lines = blocks.lines_changed(source, {**gone, at.end_line: text})
    return (blocks.fix("schedule_anew", lines, "schedule_anew", **dict(advice.summary.values)),) if lines else ()


def _binding(label: Label) -> tuple[SourceFile, ast.Assign, str] | None:
    """The innermost assignment in the label's stack: the call of a factory that returns it."""
    for frame in reversed(blocks.user_frames(label)):
        found = statement_at(frame)
        if found is not None and isinstance(found.node, ast.Assign) and len(found.node.targets) == 1:
            target = found.node.targets[0]
            if isinstance(target, ast.Name | ast.Attribute):
                return found.source, found.node, ast.unparse(target)
    return None


def _is_read_before(source: SourceFile, made: ast.Assign, end: ast.stmt) -> bool:
    """Whether a statement between ``made`` and ``end`` may read what ``made`` binds: all in one block, else True."""
    block = source.block(made)
    if end not in block:
        return True
    between, names = block[block.index(made) + 1 : block.index(end)], assigned_names(made)
    inner = (one for node in between for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute))
    return any(source.text(one) in names for one in inner)
