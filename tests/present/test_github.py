"""Annotations: one command a line, escaped as the runner unescapes it."""

import dataclasses
import re

from hostile import MIXED, hostile
from sample_reports import REPORTS, SOURCES, bridge, false_alarm, nothing_found, several_lines, words

from cases import each
from gradsan.model import Frame, Label
from gradsan.present import render_github
from gradsan.present.json import plain

COMMAND = re.compile(r"::(error|warning|notice) ([^:]*)::(.*)")


def commands(made, language="en"):
    """As the runner reads them: (command, properties, message)."""
    read = []
    for row in render_github(made, language=language, cwd=SOURCES).splitlines():
        name, properties, message = COMMAND.fullmatch(row).groups()
        values = dict(part.split("=", 1) for part in properties.split(","))
        read.append((name, {key: unescape(value) for key, value in values.items()}, unescape(message)))
    return read


def unescape(text):
    for escaped, plain_text in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(escaped, plain_text)
    return text


@each("language", ["en", "zh"])
@each("name", REPORTS)
def test_every_row_is_a_command(name, language):
    read = commands(REPORTS[name](), language)
    assert sum(one[0] != "notice" or ": " in one[1]["title"] for one in read) >= len(REPORTS[name]().diagnoses)


def test_the_finding_stands_at_the_use_and_its_labels_are_notices():
    read = commands(bridge())
    assert [(name, values["line"]) for name, values, _ in read] == [
        ("error", "12"),
        ("notice", "10"),
        ("notice", "13"),
        ("notice", "14"),
    ]
    _, values, message = read[0]
    assert values["file"] == "rnn.py"
    assert values["endLine"] == "12"
    assert values["title"] == "gradsan GS111: this loss reaches back across an optimizer step"
    assert "help: cut the graph where the state is carried over" in message


def test_severities_are_mapped():
    made = {
        severity: dataclasses.replace(bridge().diagnoses[0], severity=severity)
        for severity in ("error", "warning", "note")
    }
    names = [commands(dataclasses.replace(bridge(), diagnoses=(one,)))[0][0] for one in made.values()]
    assert names == ["error", "warning", "notice"]
    assert commands(false_alarm())[0][0] == "warning"


def test_the_runner_reads_back_the_commands():
    text = "50%, a:b\r\n::error::no%0A"
    found = dataclasses.replace(bridge().diagnoses[0], title=plain(text), explanation=plain(text), fixes=(), notes=())
    [first, *_] = commands(dataclasses.replace(bridge(), diagnoses=(found,)))
    assert first[1]["title"] == f"gradsan GS111: {text}"
    assert first[2] == text


def test_hostile_text_makes_no_further_command():
    made = hostile()
    rows = render_github(made, language="en").split("\n")
    # All four labels stand on one line, so there is one command.
    assert len([row for row in rows if row]) == 1
    assert "%0A" in rows[0]
    assert MIXED.count("%") > 0


def test_a_place_of_several_lines_has_no_columns():
    for _, values, _ in commands(several_lines()):
        assert ("col" in values) == (values["line"] == values["endLine"])


def test_notices_are_limited():
    message = words("result of {op}", op="x")
    many = tuple(
        dataclasses.replace(
            bridge().diagnoses[0],
            labels=tuple(
                Label(role, Frame("a.py", 10 * number + at, "f"), message)
                for at, role in enumerate(("saved", "written", "used"), 1)
            ),
        )
        for number in range(20)
    )
    read = commands(dataclasses.replace(bridge(), diagnoses=many))
    assert [name for name, _, _ in read].count("notice") == 10
    assert [name for name, _, _ in read].count("error") == 20


def test_nothing_found_says_nothing():
    assert render_github(nothing_found(), language="en") == ""
