"""Suspects where no write was logged, read from the source between the save and the use."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gradsan import source
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.array_writes import INPLACE, OF_ARRAYS, later_nodes, root_of, verdict
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.names import TAKE_IN
from gradsan.model import Frame, Label, Message, Site
from gradsan.source.methods import is_inplace_name
from gradsan.source.tree import read_source

_MOST = 5
_SCRIPTING = ("torch.jit.script", "jit.script", "script", "torch.jit.script_method")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A line that may have written: the reason (a message key), how strong it is, and how near to the save."""

    site: Site
    reason: str
    strength: int
    distance: int


def rank(facts: Facts) -> list[Suspect]:
    """The lines that may have written the tensor, likeliest first: in-place operations on its name, then calls with it.

    The functions on the save's stack are searched, from the save (or the call that led to it) onwards. Where they
    show no in-place operation, those of scripted functions in the same files: gradsan does not watch these.
    """
    names = {str(facts.name), *(name.text for name in facts.conflict.names)}
    frames = [frame for frame in facts.conflict.save.site.frames if frame.is_user]
    use = facts.conflict.use.site.shown_frame
    found = _in_functions(names, frames, use) if isinstance(facts.name, str) else []
    if any(suspect.reason == INPLACE for suspect in found):
        return found[:_MOST]
    return [*_in_scripts(facts), *found][:_MOST]


def of_arrays(facts: Facts) -> tuple[Label, ...]:
    """The lines that write by a name of an array which shares the memory: ``a -= 1`` after ``a = x.numpy()``."""
    labels: dict[tuple[str, int], Label] = {}
    for write in facts.writes or facts.missed:
        frame = write.site.shown_frame
        statement = None if frame is None or write.kind != "outside" else source.statement_at(frame)
        if frame is None or statement is None:
            continue
        taken_in = source.first_argument(frame) if write.op in TAKE_IN else None
        names = set(source.assigned_names(statement)) if taken_in is None else {taken_in}
        # What a loop writes in its next round stands above.
        first = min((loop.lineno for loop in statement.loops), default=frame.line)
        found = _in_functions(names, [replace(frame, line=first)], facts.conflict.use.site.shown_frame, OF_ARRAYS)
        found = [one for one in found if one.reason == INPLACE] or _in_other_methods(names, frame)
        for one in found:
            message = Message(one.reason, {"name": min(names)})
            for label in label_texts.at("suspect", one.site, message):
                labels[label.frame.file, label.frame.line] = label
    return tuple(labels.values())[:_MOST]


def _in_functions(
    names: set[str], frames: Sequence[Frame], use: Frame | None, methods: frozenset[str] = frozenset()
) -> list[Suspect]:
    """The lines of the functions at ``frames`` after these, up to the use, that may write by one of the names.

    ``methods`` write in place, besides those of tensors.
    """
    found: dict[tuple[str, int], Suspect] = {}
    for depth, frame in enumerate(reversed(frames)):
        for node in later_nodes(frame, use):
            judged = verdict(node, names, methods)
            if judged is None:
                continue
            reason, strength = judged
            line = node.lineno  # type: ignore[attr-defined]
            here = replace(frame, line=line, column=None, end_line=None, end_column=None)
            suspect = Suspect(Site((here,)), reason, strength, depth * 10_000 + line - frame.line)
            known = found.get((frame.file, line))
            if known is None or known.strength < strength:
                found[frame.file, line] = suspect
    return sorted(found.values(), key=lambda suspect: (-suspect.strength, suspect.distance))


def _in_other_methods(names: set[str], frame: Frame) -> list[Suspect]:
    """The lines of an object's other methods that write in place what one of its methods, at ``frame``, has handed out.

    What its constructor writes is written before that.
    """
    kept, statement = {one for one in names if one.startswith("self.")}, source.statement_at(frame)
    if not kept or statement is None:
        return []
    owner = statement.source.owner_class(statement.node)
    methods = [one for one in (() if owner is None else owner.body) if isinstance(one, ast.FunctionDef)]
    places = [replace(frame, line=one.lineno, function=one.name) for one in methods if one.name != "__init__"]
    return [one for one in _in_functions(kept, places, None, OF_ARRAYS) if one.reason == INPLACE]


def _in_scripts(facts: Facts) -> Iterator[Suspect]:
    """The in-place operations of the functions that TorchScript compiles, in the files of the save and the use."""
    frames = [one for site in (facts.conflict.save.site, facts.conflict.use.site) for one in site.frames if one.is_user]
    for file, frame in {one.file: one for one in frames}.items():
        parsed = read_source(file)
        for function in _scripted(() if parsed is None else parsed.nodes):
            numbers = {name for node in ast.walk(function) if (name := _number_bound(node)) is not None}
            lines = {node.lineno for node in ast.walk(function) if _writes_in_place(node, numbers)}  # type: ignore[attr-defined]
            for line in sorted(lines):
                here = Frame(file, line, function.name, is_user=True)
                yield Suspect(Site((here,)), "label.suspect.scripted", 2, abs(line - frame.line))


def _scripted(nodes: Sequence[ast.AST]) -> Iterator[ast.FunctionDef]:
    """The functions, and methods of classes, that a file passes to ``torch.jit.script``."""
    given = {
        root_of(argument.func if isinstance(argument, ast.Call) else argument)
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _SCRIPTING
        for argument in node.args[:1]
    }
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if node.name in given or any(ast.unparse(one) in _SCRIPTING for one in node.decorator_list):
            yield from (one for one in ast.walk(node) if isinstance(one, ast.FunctionDef))


def _number_bound(node: ast.AST) -> str | None:
    """``n`` of ``n = 0``."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        return root_of(node.targets[0])
    return None


def _writes_in_place(node: ast.AST, numbers: set[str]) -> bool:
    """Whether a node appears to be an in-place operation; ``numbers`` are names of plain numbers."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Subscript) or root_of(node.target) not in numbers
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Subscript)
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(function, ast.Attribute) and is_inplace_name(function.attr)
