"""Imports at a program's top, parsed from its text: installed modules that a server of trials may import ahead.

The user's own modules are only read, never imported: a patch may change them, and importing them runs the program.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradsan.repair.libraries import is_library

_MOST_FILES = 200


@dataclass(slots=True)
class Preload:
    """The ``modules`` in the program's import order, and the ``environment`` that it sets before that.

    ``from package import name`` is "package:name": a package may load what is behind a name when it is first asked.
    ``is_known`` is False where the environment is changed in a way that only running shows: imported ahead, a module
    might read something else from it. ``has_optimizers``: the first optimizer that is made imports torch._dynamo, which
    takes as long as torch itself.
    """

    modules: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    is_known: bool = True
    has_optimizers: bool = False
    _read: set[str] = field(default_factory=set)

    def read(self, path: str) -> None:
        """Add the imports of the file at ``path``, and those of the user's own modules that it imports."""
        real = os.path.realpath(path)
        if real in self._read or len(self._read) >= _MOST_FILES:
            return
        self._read.add(real)
        try:
            text = Path(path).read_bytes()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            return
        self.has_optimizers = self.has_optimizers or b"optim" in text
        for statement in _at_the_top(tree.body):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._add(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                self._add_from(statement, path)
            elif not self.modules:
                self._note_environment(statement)

    def _add_from(self, statement: ast.ImportFrom, path: str) -> None:
        if statement.level:
            folder = Path(path).parents[statement.level - 1]
            inner = folder.joinpath(*(statement.module or "").split("."))
            candidates = [inner.with_suffix(".py"), inner / "__init__.py"]
            candidates += [inner / f"{alias.name}.py" for alias in statement.names]
            for file in candidates:
                if file.is_file():
                    self.read(str(file))
        elif statement.module:
            self._add(statement.module, tuple(alias.name for alias in statement.names))

    def _add(self, name: str, members: tuple[str, ...] = ()) -> None:
        try:
            spec = importlib.util.find_spec(name.partition(".")[0])
        except (ImportError, ValueError):
            return
        if spec is None:
            return
        if spec.origin in (None, "built-in", "frozen") and not spec.submodule_search_locations:
            return
        places = [spec.origin] if spec.origin and Path(spec.origin).is_file() else []
        places += list(spec.submodule_search_locations or ())
        if all(is_library(str(place)) for place in places):
            wanted = [f"{name}:{one}" for one in members if one != "*"] or [name]
            self.modules += [one for one in wanted if one not in self.modules]
            return
        for place in spec.submodule_search_locations or ():
            inner = Path(place).joinpath(*name.split(".")[1:])
            for file in (inner.with_suffix(".py"), inner / "__init__.py", *(inner / f"{one}.py" for one in members)):
                if file.is_file():
                    self.read(str(file))
        if not spec.submodule_search_locations and spec.origin:
            self.read(spec.origin)

    def _note_environment(self, statement: ast.stmt) -> None:
        if not any(_is_environment(node) for node in ast.walk(statement)):
            return
        found = _constant_assignment(statement)
        if found is None:
            # Reading it does not change it.
            self.is_known = self.is_known and not _may_change(statement)
        else:
            name, value, is_default = found
            if not (is_default and name in os.environ):
                self.environment.setdefault(name, value)


def _at_the_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that importing a file always runs, and those inside ``try``."""
    for statement in body:
        if isinstance(statement, ast.Try):
            yield from _at_the_top(statement.body)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
            yield statement


def _is_environment(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("environ", "putenv")


def _may_change(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and _is_environment(node.value)
        ):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = node.func.attr in ("update", "setdefault", "pop", "clear") and _is_environment(node.func.value)
            if changes or node.func.attr in ("putenv", "unsetenv"):
                return True
    return False


def _constant_assignment(statement: ast.stmt) -> tuple[str, str, bool] | None:
    """``os.environ["A"] = "b"`` and ``os.environ.setdefault("A", "b")`` as (name, value, whether it is a default)."""
    key: ast.expr | None = None
    value: ast.expr | None = None
    is_default = False
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Subscript) and _is_environment(target.value):
            key, value = target.slice, statement.value
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        is_default = isinstance(call.func, ast.Attribute) and call.func.attr == "setdefault"
        if is_default and len(call.args) == 2:
            key, value = call.args
    if (
        isinstance(key, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(value, ast.Constant)
        and isinstance(value.value, str)
    ):
        return key.value, value.value, is_default
    return None
