"""Parts of the HTML page for a reader at a desk: colours, the editor, the codes' pages, when and how long."""

import dataclasses
import html
import re
from typing import get_args

import pytest
from sample_reports import REPORTS, SOURCES, bridge, in_a_loop, two_files
from test_html import Page

from cases import each
from gradsan._editors import EDITORS, address_in, checked_editor, link_to
from gradsan.model import Program
from gradsan.model._findings import Role
from gradsan.present import render_html
from gradsan.present.html._snippet import coloured, colours_of, paint
from gradsan.text import codes, page

SOURCE = '''\
def f(x):  # doubles
    """A string
    of 2 lines, for example"""
    return x is not None and x * 2.5
'''


def test_source_is_coloured_by_what_it_is():
    assert coloured(SOURCE) == [
        ((0, 3, "kw"), (11, 20, "co")),
        ((4, 15, "st"),),
        ((0, 30, "st"),),
        ((4, 10, "kw"), (13, 15, "kw"), (16, 19, "kw"), (20, 24, "kw"), (25, 28, "kw"), (33, 36, "nu")),
        (),
    ]
    line = SOURCE.split("\n")[3]
    assert paint(line, coloured(SOURCE)[3], 4, 12) == '<span class="kw">return</span> x'
    assert coloured('x = "not closed') != []


def test_a_line_in_the_middle_of_a_string_is_coloured_as_one(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(SOURCE, encoding="utf-8")
    assert colours_of(str(file), [3]) == {3: ((0, 30, "st"),)}
    assert colours_of(str(tmp_path / "none.py"), [3]) == {}


@each("name", REPORTS)
def test_colours_and_marks_leave_the_lines_as_they_are(name):
    text = render_html(REPORTS[name](), language="en", cwd=SOURCES)
    for number, shown in re.findall(r'class="number">(\d+)</span><code>(.*?)</code></div>', text):
        plain = html.unescape(re.sub("<[^>]+>", "", re.sub(r'<a class="badge.*?</a>', "", shown)))
        lines = [file.read_text(encoding="utf-8").splitlines() for file in SOURCES.rglob("*.py")]
        assert plain in [one[int(number) - 1] for one in lines if len(one) >= int(number)] or "read" in plain


@each(
    ("choice", "environ", "begins"),
    [
        ("none", {"TERM_PROGRAM": "vscode"}, None),
        ("auto", {}, None),
        ("auto", {"TERM_PROGRAM": "vscode"}, "vscode://file/"),
        ("auto", {"TERM_PROGRAM": "vscode", "CURSOR_TRACE_ID": "1"}, "cursor://file/"),
        ("auto", {"TERM_PROGRAM": "vscode", "SSH_CONNECTION": "1 2"}, None),
        ("auto", {"TERM_PROGRAM": "vscode", "WSL_DISTRO_NAME": "U b"}, "vscode://vscode-remote/wsl+U%20b/"),
        ("auto", {"ZED_TERM": "true"}, "zed://file/"),
        ("pycharm", {}, "pycharm://open?file=/"),
        ("x-mine://{file}#{line}", {}, "x-mine:///"),
    ],
)
def test_the_editor_is_that_of_the_terminal_or_as_asked(choice, environ, begins):
    address = address_in(checked_editor(choice), environ)
    assert (address is None) == (begins is None)
    if address is not None:
        link = link_to(address, SOURCES / "a b.py", 7, None)
        assert link.startswith(begins)
        assert "a%20b.py" in link
        assert "7" in link


@each("value", ["notepad", "javascript:alert('{file}')", "JavaScript://{file}", "vscode://file", 7, ""])
def test_unknown_editors_are_refused(value):
    with pytest.raises(ValueError):
        checked_editor(value)


def test_places_open_in_the_editor_where_the_file_is_there(tmp_path):
    def links(cwd, editor):
        read = Page(render_html(two_files(), language="en", cwd=cwd, editor=editor))
        return [link for link in read.links if not link.startswith("#")]

    assert links(SOURCES, None) == []
    assert links(tmp_path, EDITORS["vscode"]) != [], "the files are named in full"
    found = links(SOURCES, EDITORS["vscode"])
    assert f"vscode://file{SOURCES.as_posix()}/model.py" in found[0]
    assert all(re.search(r":\d+:\d+$", link) for link in found)
    elsewhere = dataclasses.replace(two_files(), diagnoses=())
    assert [one for one in Page(render_html(elsewhere, language="en")).links if "vscode" in one] == []


@each("language", ["en", "zh"])
def test_each_code_has_its_page_once(language):
    both = dataclasses.replace(bridge(), diagnoses=(*bridge().diagnoses, *bridge().diagnoses, *in_a_loop().diagnoses))
    text = render_html(both, language=language, cwd=SOURCES)
    read = Page(text)
    used = {one.code for one in both.diagnoses}
    assert {one for one in read.ids if one.startswith("about-")} == {f"about-{code}" for code in used}
    assert read.links.count(f"#about-{bridge().diagnoses[0].code}") == 2
    for heading in re.findall(r"(?m)^## (.+)$", page(bridge().diagnoses[0].code, language)):
        assert f"<h4>{html.escape(heading)}</h4>" in text


@each("language", ["en", "zh"])
def test_every_page_becomes_html(language):
    (first, *_) = bridge().diagnoses
    diagnoses = tuple(dataclasses.replace(first, code=entry.code) for entry in codes())
    read = Page(render_html(dataclasses.replace(bridge(), diagnoses=diagnoses), language=language, cwd=SOURCES))
    assert read.loads == []
    assert {f"about-{entry.code}" for entry in codes()} <= set(read.ids)
    assert not re.search(r"(?m)^(##|```|\|[- ])", read.text)


@each(
    ("seconds", "en", "zh"),
    [
        (3.24, "ran 3.2 s", "运行 3.2 秒"),
        (59.96, "ran 1 min 0 s", "运行 1 分 0 秒"),
        (754.0, "ran 12 min 34 s", "运行 12 分 34 秒"),
        (3600.0 * 30 + 61, "ran 30 h 1 min", "运行 30 小时 1 分"),
        (None, None, None),
    ],
)
def test_when_and_how_long(seconds, en, zh):
    program = Program(("train.py",), started="2026-05-01T09:30:07+02:00", seconds=seconds)
    for language, said in (("en", en), ("zh", zh)):
        text = Page(render_html(dataclasses.replace(bridge(), program=program), language=language)).text
        assert ("2026-05-01 09:30:07" in text) == (said is not None)
        assert said is None or said in text


def test_every_role_but_a_note_has_its_colour():
    style = re.search(r"<style>(.*?)</style>", render_html(bridge(), language="en"), re.DOTALL)[1]
    roles = set(get_args(Role)) - {"note"}
    for form in (".{}.badge", ".line mark.{}", ".said.{}"):
        assert [role for role in sorted(roles) if form.format(role) not in style] == []


def test_the_command_that_tries_fixes_is_there_until_they_were_tried():
    command = "gradsan fix train.py"
    untried = dataclasses.replace(in_a_loop(), next=("gradsan explain GS101", command))
    has_failed = dataclasses.replace(bridge(), next=(command,))
    assert any(fix.verification.status == "failed" for one in bridge().diagnoses for fix in one.fixes)
    assert (command in render_html(untried, language="en")) == all(
        fix.verification.status == "not_run" for one in in_a_loop().diagnoses for fix in one.fixes
    )
    assert command not in render_html(has_failed, language="en")
