"""State of an object, cut or emptied where a library enters the program in each round: at the start of a method.

The loop of the rounds is the library's, and no statement of the program comes after one of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsan.model import Frame, Held
from gradsan.source.change import Change, insert_before
from gradsan.source.flow.emptied import is_of_one_round
from gradsan.source.identifiers import assigned_pairs, leaf_name, parameters
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.cuts.uncut import detached_anew
from gradsan.source.tree import SourceFile, read_source


def emptied_on_entry(entry: Frame, held: Sequence[Held]) -> tuple[Change, str] | None:
    """A line at the start of the method at ``entry`` that empties a list of its object, and the name of the list."""
    for one in _own(entry, [one for one in held if one.is_old]):
        name = next((layer.path for layer in one.around if layer.kind in ("list", "deque")), None)
        source = None if name is None else _holder(one)
        if name is not None and source is not None and is_of_one_round(source, name):
            change = _at_start(entry, f"{name}.clear()", "forget_collected")
            return None if change is None else (change, name)
    return None


def detached_on_entry(entry: Frame, held: Sequence[Held]) -> tuple[Change, tuple[str, ...]] | None:
    """A line at the start of the method at ``entry`` that detaches the attributes of its object, and their names.

    Where the program sets an attribute to None, too, it is compared with that. None where the program replaces None
    before it reads the attribute: then what it reads can be detached there. And where it begins as a number.
    """
    found: dict[str, str] = {}
    may_be_none = False
    for one in _own(entry, held):
        source = _holder(one)
        cut = None if source is None else detached_anew(source, one)
        if source is None or cut is None:
            return None
        found.setdefault(*cut)
        attribute = leaf_name(ast.parse(cut[0], mode="eval").body)
        set_to = _constants(source, attribute)
        if _is_begun_where_none(source, attribute) or set_to - {None}:
            return None
        may_be_none |= None in set_to
    if not found:
        return None
    text = f"{', '.join(found)} = {', '.join(found.values())}"
    if may_be_none:
        text = f"if {' and '.join(f'{one} is not None' for one in found)}:\n    {text}"
    change = _at_start(entry, text, "detach")
    return None if change is None else (change, tuple(found))


def begins_without_tensor(file: str, name: str) -> bool:
    """Whether the file sets an attribute to None or a number, and does not replace None before it reads it."""
    source, attribute = read_source(file), name.rpartition(".")[2]
    if source is None or attribute == name:
        return False
    return bool(_constants(source, attribute)) and not _is_begun_where_none(source, attribute)


def _own(entry: Frame, held: Sequence[Held]) -> Iterator[Held]:
    """Those of ``held`` that an object of the method's class leads to, each by its expression in the method."""
    statement = statement_at(entry)
    function = None if statement is None else statement.function
    owner = None if statement is None or function is None else statement.source.owner_class(function)
    own = [] if function is None else parameters(function)
    for one in held if owner is not None and own else ():
        kinds = [layer.made_by for layer in one.around]
        if owner is None or (entry.file, owner.name) not in kinds:
            continue
        around = one.around[kinds.index((entry.file, owner.name)) :]
        begins = len(around[0].path)
        layers = tuple(replace(each, path=own[0] + _as_python(each.path[begins:])) for each in around)
        yield replace(one, path=own[0] + _as_python(one.path[begins:]), around=layers)


def _as_python(path: str) -> str:
    """``.layers[0].state`` for ``.layers.0.state``, as PyTorch names the modules of a list."""
    return re.sub(r"\.(\d+)(?=[.\[]|$)", r"[\1]", path)


def _holder(held: Held) -> SourceFile | None:
    """The file of the class of the innermost object on the way to a value."""
    files = [layer.made_by[0] for layer in held.around if layer.kind == "object" and layer.made_by[0]]
    return read_source(files[-1]) if files else None


def _constants(source: SourceFile, attribute: str | None) -> set[object]:
    """The constants that the file assigns to an attribute: None, or the number with which a sum begins."""
    statements = (node for node in source.nodes if isinstance(node, ast.Assign | ast.AnnAssign))
    pairs = (pair for node in statements for pair in assigned_pairs(node))
    return {value.value for to, value in pairs if leaf_name(to) == attribute and isinstance(value, ast.Constant)}


def _is_begun_where_none(source: SourceFile, attribute: str | None) -> bool:
    """``if self.state is None: self.state = torch.zeros(...)``."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.Is)
        and leaf_name(node.test.left) == attribute
        and any(isinstance(one, ast.Assign) and attribute in map(leaf_name, one.targets) for one in node.body)
        for node in source.nodes
    )


def _at_start(entry: Frame, text: str, kind: str) -> Change | None:
    statement = statement_at(entry)
    if statement is None or statement.function is None or isinstance(statement.function, ast.Lambda):
        return None
    source, function = statement.source, statement.function
    is_documented = ast.get_docstring(function, clean=False) is not None and len(function.body) > 1
    first = function.body[1 if is_documented else 0]
    indent = source.indent(source.span(first))
    return insert_before(source, first, text.replace("\n", f"\n{indent}"), kind)
