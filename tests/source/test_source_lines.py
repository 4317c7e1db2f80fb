"""Lines of files, notebook cells and archives, and the statement at a frame."""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from source_snippets import HAS_COLUMNS, run_with_fakes, without_columns

from cases import each
from gradsan.model import Frame
from gradsan.source import (
    expression_at,
    expressions_at,
    is_in_function_forward,
    source_line,
    source_lines,
    statement_at,
)
from gradsan.source.tree import read_source


def test_lines_of_a_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes("x = 1\r\n\ty = 'ä'\n\x0cz = 3".encode())
    assert source_lines(str(path)) == ("x = 1", "\ty = 'ä'", "\x0cz = 3")
    assert source_line(str(path), 2) == "\ty = 'ä'"
    assert source_line(str(path), 0) is None
    assert source_line(str(path), 4) is None


def test_declared_encoding(tmp_path):
    path = tmp_path / "latin.py"
    path.write_bytes("# -*- coding: latin-1 -*-\ngröße = 'ß'; größe.upper()\n".encode("latin-1"))
    assert source_line(str(path), 2) == "größe = 'ß'; größe.upper()"
    code = compile(path.read_bytes(), str(path), "exec")
    if HAS_COLUMNS:
        call = next(one.positions for one in dis.get_instructions(code) if one.opname == "CALL")
        line = source_line(str(path), 2).encode()
        column, end = (len(line[:offset].decode()) + 1 for offset in (call.col_offset, call.end_col_offset))
        assert expression_at(Frame(str(path), 2, "<module>", column, 2, end)).text == "größe.upper()"


@each("data", [b"# coding: nonsense\nx = 1\n", b"x = '\xff'\n", b"\x00\x01"])
def test_undecodable_or_invalid_files_give_nothing(tmp_path, data):
    path = tmp_path / "bad.py"
    path.write_bytes(data)
    assert read_source(str(path)) is None
    assert statement_at(Frame(str(path), 1, "<module>")) is None


def test_missing_things_give_none(tmp_path):
    for file in (str(tmp_path / "none.py"), "<string>", "<stdin>", "", "relative.py", str(tmp_path)):
        assert source_lines(file) == ()
        assert source_line(file, 1) is None
        assert statement_at(Frame(file, 1, "f", 1, 1, 5)) is None


def test_a_relative_name_is_not_searched_along_the_path(tmp_path, monkeypatch):
    (tmp_path / "somewhere_else.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert source_lines("somewhere_else.py") == ()


def test_notebook_cells_come_from_linecache(monkeypatch):
    name = "<ipython-input-7-abc>"
    text = "h = f(h)\n"
    monkeypatch.setitem(linecache.cache, name, (len(text), None, [text], name))
    assert source_line(name, 1) == "h = f(h)"
    assert statement_at(Frame(name, 1, "<cell line: 1>")).text == "h = f(h)"


def test_a_changed_file_is_read_again_and_a_deleted_one_kept(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("x = 1\n")
    assert source_line(str(path), 1) == "x = 1"
    path.write_text("y = 12345\n")
    assert source_line(str(path), 1) == "y = 12345"
    path.unlink()
    assert source_line(str(path), 1) == "y = 12345"


def test_zipped_modules(tmp_path, monkeypatch):
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_for_gradsan/__init__.py", "")
        file.writestr("zipped_for_gradsan/inner.py", "\x0c\ndef f(x):\n    return x.add_(1)\n")
    name = str(archive / "zipped_for_gradsan" / "inner.py")
    assert source_line(name, 3) == "    return x.add_(1)"
    monkeypatch.syspath_prepend(str(archive))
    import zipped_for_gradsan.inner as inner

    linecache.clearcache()
    assert source_line(inner.f.__code__.co_filename, 3) == "    return x.add_(1)"
    assert statement_at(Frame(inner.f.__code__.co_filename, 3, "f")).text == "return x.add_(1)"
    for module in ("zipped_for_gradsan", "zipped_for_gradsan.inner"):
        del sys.modules[module]


PROGRAM = """
def train(xs):
    for q in xs:
        while True:
            if not (q
                    .add_(1)):
                break
            x.mul_(2)
            break
    return [u.sub_(1) for u in xs]
class Net:
    def forward(self, q): return q.div_(2)
    go = lambda self, q: q.exp_()
train([x, y])
Net().forward(x); Net().go(y)
"""


def test_statements_and_what_is_around_them(tmp_path):
    ran = run_with_fakes(tmp_path, PROGRAM)
    for strip in (lambda frame: frame, without_columns):
        inner = statement_at(strip(ran.frame("mul_")))
        assert (inner.text, inner.function.name) == ("x.mul_(2)", "train")
        assert [type(loop) for loop in inner.loops] == [ast.For, ast.While]
        head = statement_at(strip(ran.frame("add_")))
        assert head.text == "if not (q\n                    .add_(1)):"
        assert statement_at(strip(ran.frame("sub_"))).text == "return [u.sub_(1) for u in xs]"
        short = statement_at(strip(ran.frame("div_")))
        assert (short.text, short.function.name, short.loops) == ("return q.div_(2)", "forward", ())
        assert isinstance(statement_at(strip(ran.frame("exp_"))).function, ast.Lambda)


def test_a_source_that_changed_since_gives_none(tmp_path):
    ran = run_with_fakes(tmp_path, PROGRAM)
    frame = ran.frame("mul_")
    Path(ran.file).write_text("import os\n" + ran.text)
    if HAS_COLUMNS:
        assert statement_at(frame) is None
        assert expressions_at(frame) == ()
    Path(ran.file).write_text(ran.text.replace("def train", "def other"))
    assert statement_at(without_columns(frame)) is None
    Path(ran.file).write_text(ran.text + "\n(")
    assert statement_at(frame) is None


def test_two_statements_on_a_line_are_ambiguous_without_columns(tmp_path):
    ran = run_with_fakes(tmp_path, "x.add_(1); y.add_(1)")
    assert statement_at(without_columns(ran.frame("add_"))) is None
    if HAS_COLUMNS:
        assert [statement_at(ran.frame("add_", index)).text for index in (0, 1)] == ["x.add_(1)", "y.add_(1)"]


def test_resumed_functions_of_dynamo_are_recognised(tmp_path):
    ran = run_with_fakes(tmp_path, PROGRAM)
    line = without_columns(ran.frame("mul_"))
    resumed = Frame(line.file, line.line, "torch_dynamo_resume_in_train_at_4")
    assert statement_at(resumed).text == "x.mul_(2)"
    assert statement_at(Frame(line.file, line.line, "train.<locals>.train")).text == "x.mul_(2)"


@pytest.mark.skipif(not HAS_COLUMNS, reason="this Python has no columns")
@each("module", ["argparse", "statistics", "inspect", "asyncio.base_events", "tokenize"])
def test_every_operation_of_real_modules_is_found(module):
    file = __import__(module, fromlist=["x"]).__file__
    source = read_source(file)
    wanted = {"BINARY_OP": (ast.BinOp, ast.AugAssign, ast.Subscript), "STORE_SUBSCR": ast.Subscript}
    wanted |= {"CALL": ast.Call, "CALL_KW": ast.Call}
    own = _places_of_the_compiler(ast.parse("\n".join(source.lines)))
    missed, seen = [], 0
    pending = [compile("\n".join(source.lines), file, "exec")]
    while pending:
        code = pending.pop()
        pending += [constant for constant in code.co_consts if hasattr(constant, "co_code")]
        for one in dis.get_instructions(code):
            place = one.positions
            if one.opname not in wanted or None in place or tuple(place) in own:
                continue
            seen += 1
            first, last = source.lines[place.lineno - 1], source.lines[place.end_lineno - 1]
            column = len(first.encode()[: place.col_offset].decode()) + 1
            end = len(last.encode()[: place.end_col_offset].decode()) + 1
            found = expression_at(Frame(file, place.lineno, code.co_name, column, place.end_lineno, end))
            if found is None or not isinstance(found.node, wanted[one.opname]):
                missed.append((one.opname, place))
    assert seen > 50
    assert not missed


def _places_of_the_compiler(module):
    """Where the compiler calls or stores on its own: comprehensions, classes, decorators, with, asserts."""
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.ClassDef, ast.With, ast.AsyncWith)
    kinds += (ast.AnnAssign, ast.Assert, ast.FunctionDef, ast.AsyncFunctionDef)
    places = set()
    for node in ast.walk(module):
        if isinstance(node, kinds):
            managers = [item.context_expr for item in getattr(node, "items", ())]
            tested = [node.test] if isinstance(node, ast.Assert) else []
            for one in [node, *tested, *managers, *getattr(node, "decorator_list", ())]:
                places.add((one.lineno, one.end_lineno, one.col_offset, one.end_col_offset))
    return places


def test_a_module_with_a_relative_file_does_no_harm_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    module = ModuleType("relative")
    module.__file__ = "relative.py"
    monkeypatch.setitem(sys.modules, "relative", module)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert source_line("/no/such/file.py", 1) is None


def test_the_forward_of_a_custom_function_is_known_without_a_frame_of_torchs(tmp_path):
    text = """class Scale(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        g.mul_(2)


class Net(Module):
    def forward(self, x):
        x.mul_(2)

    @staticmethod
    def backward(loss):
        loss.backward()
"""
    file = tmp_path / "functions.py"
    file.write_text(text, encoding="utf-8")
    lines = {4: "forward", 8: "backward", 13: "forward", 17: "backward"}
    assert [line for line, name in lines.items() if is_in_function_forward(Frame(str(file), line, name))] == [4]
