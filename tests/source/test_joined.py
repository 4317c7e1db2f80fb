"""Lines of several statements, split for those who move statements and joined again in what they change."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from gradsan.model import Fix, Frame, Message
from gradsan.source import on_own_lines
from gradsan.source.tree import read_source, source_lines

PROGRAM = '''\
import torch; from torch import nn
x = 1; y = [
    2,
    3]; z = "a;b"  # one; two
class Net(nn.Module):
    size = 3; """text"""
    def forward(self, x):
        if x: h = x; return h
        h = x + 1; h = h * 2; \\
            self.h = h
        return h;
for step in range(3):
    ü = x; loss = f(ü); loss.backward()
    opt.step(); print(step)
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def frames_of(file: str) -> list[Frame]:
    source = read_source(file)
    assert source is not None
    spans = [source.span(node) for node in source.nodes if isinstance(node, ast.expr | ast.stmt)]
    return [Frame(file, one.line, "f", one.column, one.end_line, one.end_column, True) for one in spans]


def test_every_place_of_the_split_text_is_the_same_code_and_comes_back(file: str) -> None:
    whole = read_source(file)
    assert whole is not None
    given = frames_of(file)
    seen: list[Frame] = []

    def work(frames: list[Frame]) -> list[Frame]:
        split = read_source(file)
        assert split is not None
        assert ast.dump(split.module) == ast.dump(whole.module)
        assert len(split.lines) == len(whole.lines) + 8
        inside = frames_of(file)
        assert {(one.line, one.column, one.end_line, one.end_column) for one in frames} == {
            (one.line, one.column, one.end_line, one.end_column) for one in inside
        }
        seen.extend(frames)
        return frames

    assert on_own_lines(given, work) == given
    assert seen != given


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loss.backward()": "    again()"}, "    ü = x; loss = f(ü)\n    again()"),
        (
            {"loss.backward()": "    loss.backward()\n    again()"},
            "    ü = x; loss = f(ü); loss.backward()\n    again()",
        ),
        ({"loss = f(ü)": "    extra()\n    loss = f(ü)"}, "    ü = x\n    extra()\n    loss = f(ü); loss.backward()"),
        ({"ü = x": ""}, "    loss = f(ü); loss.backward()"),
        ({"ü = x": "", "loss = f(ü)": "", "loss.backward()": ""}, ""),
    ],
)
def test_changed_lines_leave_the_other_statements_on_their_line(
    file: str, changed: dict[str, str], expected: str
) -> None:
    def work(frame: Frame) -> Fix:
        rows = [row.strip() for row in source_lines(file)]
        lines = tuple((file, rows.index(old) + 1, new) for old, new in changed.items())
        return Fix("kind", "preserved", Message("help.kind"), lines=lines)

    fix = on_own_lines(Frame(file, 13, "<module>", 5, 13, 10, True), work)
    assert fix.lines == ((file, 13, expected),)


def test_a_frame_without_its_column_leaves_the_file_as_it_is(file: str) -> None:
    count = len(source_lines(file))
    of_user = Frame(file, 13, "<module>", is_user=True)
    assert on_own_lines(of_user, lambda _: len(source_lines(file))) == count
    assert on_own_lines(replace(of_user, line=3), lambda _: len(source_lines(file))) == count + 8


def test_files_of_libraries_are_not_split(file: str) -> None:
    count = len(source_lines(file))
    assert on_own_lines(Frame(file, 3, "<module>"), lambda _: len(source_lines(file))) == count
