"""Patches keep what they do not change: encoding, line ends, tabs, a missing last line end."""

import subprocess

import pytest

from cases import each
from gradsan.repair.patch import Patch, PatchError


def patched(tmp_path, content, lines):
    file = tmp_path / "program.py"
    file.write_bytes(content)
    return Patch().with_lines(tuple((str(file), line, text) for line, text in lines)), str(file)


@each(
    ("before", "lines", "after"),
    [
        (b"a = 1\nb = 2\n", [(2, "b = 3")], b"a = 1\nb = 3\n"),
        (b"a = 1\r\nb = 2\r\n", [(1, "a = 1\na = 2")], b"a = 1\r\na = 2\r\nb = 2\r\n"),
        (b"if 1:\n\ta = 1", [(2, "\ta = 2")], b"if 1:\n\ta = 2"),
        (b"a = 1\nb = 2\nc = 3\n", [(2, "")], b"a = 1\nc = 3\n"),
        ("# coding: gbk\na = '梯度'\n".encode("gbk"), [(2, "a = '值'")], "# coding: gbk\na = '值'\n".encode("gbk")),
        (b"a = 1\n\nc = 3\n", [(2, "b = 2\n")], b"a = 1\nb = 2\n\nc = 3\n"),
        (b"a = 1\r\n\r\nc = 3\r\n", [(2, "b = 2\n")], b"a = 1\r\nb = 2\r\n\r\nc = 3\r\n"),
        (b"\xef\xbb\xbfa = 1\n", [(1, "a = 2")], b"\xef\xbb\xbfa = 2\n"),
    ],
)
def test_only_the_line_changes(tmp_path, before, lines, after):
    patch, file = patched(tmp_path, before, lines)
    assert patch.files[file] == after
    assert (tmp_path / "program.py").read_bytes() == before


def test_a_second_change_counts_lines_of_the_first(tmp_path):
    patch, file = patched(tmp_path, b"a = 1\nb = 2\n", [(1, "x = 0\na = 1")])
    assert patch.with_lines(((file, 3, "b = 9"),)).files[file] == b"x = 0\na = 1\nb = 9\n"


def test_changes_of_an_earlier_patch_are_left_out(tmp_path):
    first, file = patched(tmp_path, b"a = 1\nb = 2\nc = 3\n", [(1, "a = 7")])
    both = first.with_lines(((file, 3, "c = 9"),))
    assert both.without(first).files[file] == b"a = 1\nb = 2\nc = 9\n"
    assert both.without(both).files == {}


def test_a_row_added_where_an_earlier_patch_added_another_is_left_alone(tmp_path):
    first, file = patched(tmp_path, b"a = 1\nb = 2\n", [(1, "a = 1\nx = 7")])
    both = first.with_lines(((file, 2, "x = 7\ny = 8"),))
    assert both.without(first).files[file] == b"a = 1\ny = 8\nb = 2\n"


@pytest.mark.parametrize("lines", [[(1, "a = (")], [(7, "a = 1")]])
def test_patches_that_are_not_python_are_refused(tmp_path, lines):
    with pytest.raises(PatchError):
        patched(tmp_path, b"a = 1\n", lines)


@pytest.mark.parametrize("content", [b"a = 1\nb = 2\n", b"a = 1\nb = 2", b"a = 1\r\nb = 2\r\n"])
def test_git_takes_the_diff(tmp_path, content):
    patch, file = patched(tmp_path, content, [(2, "b = 3\nc = 4")])
    diff = tmp_path / "fix.diff"
    diff.write_bytes(patch.diff(tmp_path).encode())
    subprocess.run(["git", "apply", "fix.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "program.py").read_bytes() == patch.files[file]


def test_size_counts_changed_lines(tmp_path):
    assert patched(tmp_path, b"a = 1\nb = 2\n", [(1, "a = 2")])[0].size == 1
    assert patched(tmp_path, b"a = 1\nb = 2\n", [(1, "a = 2\na = 3")])[0].size == 2


def test_lines_are_counted_as_python_counts_them(tmp_path):
    # A form feed and a line separator end no line, a lone carriage return does.
    content = "a = 1\n\fb = '\u2028'\rc = 3\n".encode()
    patch, file = patched(tmp_path, content, [(3, "c = 4")])
    assert patch.files[file] == content.replace(b"c = 3", b"c = 4")


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbfa = 1\nb = 2\n", "# coding: latin-1\na = 'größer'\nb = 2\n".encode("latin-1")],
    ids=["bom", "latin-1"],
)
def test_git_takes_the_diff_in_the_encoding_of_the_file(tmp_path, content):
    patch, file = patched(tmp_path, content, [(content.count(b"\n"), "b = 3")])
    (tmp_path / "fix.diff").write_bytes(patch.diff_bytes(tmp_path))
    subprocess.run(["git", "apply", "fix.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "program.py").read_bytes() == patch.files[file] == content.replace(b"b = 2", b"b = 3")


def test_a_line_of_the_new_text_is_found_in_the_old(tmp_path):
    patch, file = patched(tmp_path, b"a = 1\nb = 2\nc = 3\n", [(2, "b = 4\nb = 5")])
    assert [patch.line_before(file, line) for line in range(1, 5)] == [(1, True), (2, False), (2, False), (3, True)]
    assert patch.line_before("other.py", 7) == (7, True)
