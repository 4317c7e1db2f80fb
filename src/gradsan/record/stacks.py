"""Raw stacks: conversion to sites, detection of user code, and comparison of two stacks."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import os
import re
import site as _site
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from gradsan import _torch
from gradsan.model import Frame, Site
from gradsan.record.log import RawStack, Stack
from gradsan.record.raw_stacks import DEPTH_KEPT

_GRADSAN = str(Path(__file__).resolve().parent.parent) + os.sep
_COMMAND_LINE = _GRADSAN + "cli" + os.sep
_program_folders: list[str] = []


def count_as_user_code(folder: str) -> None:
    """Treat files below ``folder`` as the user's own, wherever it lies (the folder of the program that is run)."""
    _program_folders.append(os.path.realpath(folder) + os.sep)
    is_user_file.cache_clear()


@functools.cache
def _library_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(_site.getsitepackages() if hasattr(_site, "getsitepackages") else [])
    folders.add(_site.getusersitepackages())
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.add(str(Path(torch.__file__).parent))
    return tuple(os.path.realpath(folder) + os.sep for folder in folders if folder)


@functools.cache
def is_user_file(file: str) -> bool:
    """Whether a code object's file is the user's own code: not Python's, not an installed package, not gradsan's.

    The innermost known folder decides: a virtual environment inside a project is not the project.
    """
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<__array_function__", "<eval_with_key"))
    real = os.path.realpath(file)
    if real.startswith(_GRADSAN):
        return False
    library = max((len(folder) for folder in _library_folders() if real.startswith(folder)), default=0)
    for mark in ("site-packages", "dist-packages"):
        head, found, _ = real.rpartition(f"{os.sep}{mark}{os.sep}")
        library = max(library, len(head) + len(found))
    program = max((len(folder) for folder in _program_folders if real.startswith(folder)), default=0)
    return program > library if library else True


@functools.cache
def is_own_file(file: str) -> bool:
    """Whether a file belongs to gradsan itself; its frames never appear in a site."""
    return file.startswith(_GRADSAN) or os.path.realpath(file).startswith(_GRADSAN)


def is_of_program(stack: RawStack) -> bool:
    """Whether the program's own code is at the top of a stack, and not a library's or gradsan's."""
    file = stack.codes[0].co_filename if stack.codes else ""
    return bool(file) and is_user_file(file) and not is_own_file(file)


def is_called_by_program(stack: RawStack) -> bool:
    """Whether the program's own code made the call at which gradsan has taken this stack of its own."""
    files = itertools.takewhile(lambda file: not is_user_file(file), (code.co_filename for code in stack.codes))
    return all(is_own_file(file) or file == contextlib.__file__ for file in files)


def symbolise(stack: Stack) -> Site:
    """Convert a raw stack (innermost first) to a Site (outermost first), without frames of gradsan and its command.

    A stack read off the source (:mod:`gradsan.postmortem`) is a Site already.
    """
    if isinstance(stack, Site):
        return stack
    frames = []
    for code, lasti in zip(stack.codes, stack.lastis, strict=True):
        if code.co_filename.startswith(_COMMAND_LINE):
            break
        if not is_own_file(code.co_filename) and code.co_filename != "<frozen runpy>":
            frames.append(_frame(code, lasti))
    return Site(tuple(reversed(frames)))


def of_traceback(trace: TracebackType | None) -> tuple[Site, tuple[FrameType, ...], FrameType | None]:
    """Return the stack of a raised exception: its Site, its frames (outermost first), and the user frame of both.

    Includes the callers of the function that the exception has reached; gradsan's own frames are left out.
    """
    places: list[tuple[FrameType, int]] = []
    outer = None if trace is None else trace.tb_frame.f_back
    while outer is not None and not outer.f_code.co_filename.startswith(_COMMAND_LINE):
        places.insert(0, (outer, outer.f_lasti))
        outer = outer.f_back
    while trace is not None:
        places.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    kept = [
        (frame, lasti)
        for frame, lasti in places
        if not is_own_file(frame.f_code.co_filename) and frame.f_code.co_filename != "<frozen runpy>"
    ]
    site = Site(tuple(_frame(frame.f_code, lasti) for frame, lasti in kept))
    own = next(
        (frame for (frame, _), shown in reversed(list(zip(kept, site.frames, strict=True))) if shown.is_user), None
    )
    return site, tuple(frame for frame, _ in kept), own


_FORMATTED = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    \S.*\n?)?(?:    (?P<marks>[ ~^]+)\n?)?',
    re.MULTILINE,
)


def of_formatted(text: str) -> Site:
    """Parse a stack in the format of ``traceback.format_list``, outermost first; an unmarked line counts as a whole."""
    frames = []
    for parsed in _FORMATTED.finditer(text):
        file, line, marks = parsed["file"], int(parsed["line"]), parsed["marks"]
        path = file if file.startswith("<") else str(Path(file).absolute())
        name = _name_at(path, line, parsed["name"])
        columns: tuple[int | None, int | None] = (None, None)
        source = linecache.getline(path, line)
        if source.strip():
            indent = len(source) - len(source.lstrip())
            first = len(marks) - len(marks.lstrip()) if marks else 0
            last = len(marks.rstrip()) if marks else len(source.strip())
            columns = (indent + first + 1, indent + last + 1)
        frames.append(Frame(path, line, name, columns[0], line if columns[0] else None, columns[1], is_user_file(path)))
    return Site(tuple(frames))


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")


def _name_at(file: str, line: int, name: str) -> str:
    """Return the qualified name of the function ``name`` around a line; after a graph break, of the whole function."""
    resumed = _RESUMED.match(name)
    name = resumed[1] if resumed else name
    known = [(first, full) for (first, short), full in _names_in(file).items() if short == name and first <= line]
    return max(known)[1] if known else name


def definition_site(code: CodeType) -> Site:
    """Return the site of a function's definition, its decorators included."""
    name = qualified_name(code)
    return Site((Frame(file_of(code), code.co_firstlineno, name, is_user=is_user_file(code.co_filename)),))


def qualified_name(code: CodeType) -> str:
    """Return the qualified name of a function (``Net.forward``); on Python 3.10 it is read off the source."""
    name = getattr(code, "co_qualname", None)
    if name is None:
        name = _names_in(code.co_filename).get((code.co_firstlineno, code.co_name), code.co_name)
    return str(name)


@functools.lru_cache(maxsize=256)
def _names_in(file: str) -> dict[tuple[int, str], str]:
    """Return the qualified names of a file's functions, by their first lines and names."""
    try:
        waiting: list[tuple[ast.AST, str]] = [(ast.parse("".join(linecache.getlines(file))), "")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found: dict[tuple[int, str], str] = {}
    while waiting:
        node, around = waiting.pop()
        inside = around
        if isinstance(node, ast.ClassDef):
            inside = f"{around}{node.name}."
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found[min(one.lineno for one in (node, *decorators)), name] = around + name
            inside = f"{around}{name}.<locals>."
        body = getattr(node, "body", None)
        for child in ast.iter_child_nodes(node):
            is_within = child is body or (isinstance(body, list) and child in body)
            waiting.append((child, inside if is_within else around))
    return found


def file_of(code: CodeType) -> str:
    """Return the absolute path of a code object's file; unchanged where it is none (``<string>``)."""
    return code.co_filename if code.co_filename.startswith("<") else str(Path(code.co_filename).absolute())


def _frame(code: CodeType, lasti: int) -> Frame:
    # The file is part of the key: code objects of the same text are equal, whatever their file.
    return _frame_in(code.co_filename, code, lasti)


@functools.lru_cache(maxsize=4096)
def _frame_in(_: str, code: CodeType, lasti: int) -> Frame:
    name = qualified_name(code)
    file = file_of(code)
    is_user = is_user_file(code.co_filename)
    if hasattr(code, "co_positions") and lasti >= 0:
        positions = list(code.co_positions())
        where = positions[lasti // 2] if lasti // 2 < len(positions) else (None, None, None, None)
        line, end_line, column, end_column = where
        if line is not None:
            first = _characters(file, line, column)
            last = _characters(file, end_line, end_column)
            return Frame(file, line, name, first, end_line, last, is_user)
    return Frame(file, _line_of(code, lasti), name, is_user=is_user)


def _line_of(code: CodeType, lasti: int) -> int:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if number is not None and start <= max(lasti, 0) < end:
            line = number
    return line


def _characters(file: str, line: int | None, offset: int | None) -> int | None:
    """Convert a column from Python's (UTF-8 bytes from 0) to that of editors (characters from 1)."""
    if line is None or offset is None:
        return None
    text = linecache.getline(file, line)
    if not text:
        return offset + 1
    return len(text.encode()[:offset].decode(errors="ignore")) + 1


_FRAMES_BETWEEN_PAIRS = 8


def begin_elsewhere(one: Any, other: Any) -> bool:
    """Whether two raw stacks are of different threads, judged by their outermost frames."""
    whole = len(one.codes) < DEPTH_KEPT and len(other.codes) < DEPTH_KEPT
    return whole and one.codes[-1:] != other.codes[-1:]


def is_around(outer: Any, inner: Any) -> bool:
    """Whether the call at the raw stack ``outer`` was in progress at ``inner``, at most a few frames further in."""
    for depth in range(1, min(_FRAMES_BETWEEN_PAIRS, len(inner.codes) - 1) + 1):
        codes, offsets = inner.codes[depth:], inner.lastis[depth:]
        # Both are cut at the same depth, so the outer one may reach further out.
        if codes == outer.codes[: len(codes)] and offsets == outer.lastis[: len(codes)]:
            return True
    return False


def within_torch(one: Any, other: Any) -> bool:
    """Whether torch's own Python code made the call at ``one``, in a function in progress at ``other``, too.

    What such a function does to a value of the same call (``gaussian_nll_loss`` to its copy of the variance) or
    restores before it returns (``gradgradcheck``) is no concern of the program.
    """
    shared = 0
    outer = zip(reversed(one.codes), reversed(one.lastis), reversed(other.codes), reversed(other.lastis), strict=False)
    for code, at, other_code, other_at in outer:
        if code is not other_code:
            break
        shared += 1
        if at != other_at:
            break
    folder = _torch.package_folder()
    inner = one.codes[: len(one.codes) - shared + 1]
    # Functions that torch calls may be wrapped by a detector.
    return shared > 0 and all(code.co_filename.startswith(folder) or is_own_file(code.co_filename) for code in inner)
