"""Names by which changed lines reach modules, and the import statements they need in a file that has none."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace

from gradsan.model import Diagnosis, Lines
from gradsan.source.identifiers import imported_as
from gradsan.source.tree import SourceFile, read_source

_MODULES = ("copy", "torch")


def torch_name(source: SourceFile) -> str:
    """The file's name for torch; where it has none, that of the import which :func:`with_imports` adds."""
    return imported_as(source, "torch") or "torch"


def with_imports(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with the imports that the lines of its fixes need."""
    fixes = tuple(replace(fix, lines=lines_with_imports(fix.lines)) for fix in diagnosis.fixes)
    return diagnosis if fixes == diagnosis.fixes else replace(diagnosis, fixes=fixes)


def lines_with_imports(lines: Lines) -> Lines:
    """``lines`` with ``import torch`` in each file that reads ``torch`` in them only, and ``import copy`` likewise."""
    for file in dict.fromkeys(file for file, _, _ in lines):
        text = "\n".join(text for one, _, text in lines if one == file)
        for module in _MODULES:
            source = read_source(file) if re.search(rf"(?<![\w.]){module}\.", text) else None
            is_there = source is None or re.search(rf"^import {module}$", text, re.MULTILINE)
            if source is None or is_there or imported_as(source, module) is not None:
                continue
            # A variable of that name is read in the lines: ``copy.weight``.
            if not any(_binds(node, module) for node in source.nodes):
                lines = _with_import(lines, source, f"import {module}", module in sys.stdlib_module_names)
    return lines


def _binds(node: ast.AST, name: str) -> bool:
    is_variable = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name
    return is_variable or (isinstance(node, ast.arg) and node.arg == name)


def _with_import(lines: Lines, source: SourceFile, added: str, is_of_python: bool) -> Lines:
    """The import before that of another package, or behind those of Python's modules, or before all code."""
    body = [one for one in source.module.body if not _comes_first(one)]
    imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
    before = next((one for one in imports if is_of_python or _package(one) not in sys.stdlib_module_names), None)
    at = before or (imports or body or [None])[-1 if imports else 0]
    if at is None:
        return lines
    is_behind = before is None and bool(imports)
    number = at.end_lineno if is_behind else min(one.lineno for one in (at, *getattr(at, "decorator_list", ())))
    number = number or at.lineno
    old = next((text for one, line, text in lines if (one, line) == (source.file, number)), source.lines[number - 1])
    gap = "" if before is not None else "\n\n"
    text = f"{old}\n\n{added}" if is_behind else f"{added}\n{gap}{old}"
    others = (one for one in lines if one[:2] != (source.file, number))
    return tuple(sorted((*others, (source.file, number, text))))


def _comes_first(node: ast.stmt) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _package(node: ast.Import | ast.ImportFrom) -> str:
    path = node.names[0].name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
    return path.partition(".")[0]
