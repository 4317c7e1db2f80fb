"""Suppressed findings, on findings written by hand."""

import pytest

from cases import each
from gradsan.model import Diagnosis, Frame, Label, Message
from gradsan.suppress import RuleError, parse_rule, read_baseline, read_rules, suppress, write_baseline

SOURCE = """\
x = make()
y = x.exp()
y += 1{comment}
y.sum().backward()
text = "# gradsan: ignore"
"""


@pytest.fixture
def program(tmp_path):
    def write(comment=""):
        file = tmp_path / "train.py"
        file.write_text(SOURCE.format(comment=comment))
        return str(file)

    return write


def finding(file, code="GS101", line=3):
    labels = tuple(
        Label(role, Frame(file, number, "train", is_user=True), Message("x"))
        for role, number in (("saved", 2), ("written", line), ("used", 4))
    )
    return Diagnosis(code, "result_overwritten", "error", False, Message("t"), Message("e"), labels)


@pytest.mark.parametrize(
    "comment", ["  # gradsan: ignore", "  # gradsan: ignore[GS101]", " # x  #gradsan:ignore[GS1xx]"]
)
def test_a_comment_at_one_of_the_lines(program, comment):
    file = program(comment)
    done = suppress([finding(file)], files=[file])
    assert done.kept == ()
    assert sum(done.hits.values()) == 1
    assert done.unused == ()


def test_a_comment_for_another_code_is_said_to_be_unused(program):
    file = program("  # gradsan: ignore[GS120]")
    done = suppress([finding(file)], files=[file])
    assert len(done.kept) == 1
    assert [(rule.code, rule.line) for rule in done.unused] == [("GS120", 3)]


def test_words_in_a_string_are_no_comment(program):
    file = program()
    assert len(suppress([finding(file, line=5)], files=[file]).kept) == 1


@each(
    ("text", "takes"),
    [
        ("GS101", True),
        ("GS1xx", True),
        ("*", True),
        ("GS102", False),
        ("GS2xx", False),
        ("GS101:train.py", True),
        ("GS101:train.py:3", True),
        ("GS101:train.py:1", False),
        ("GS101:*.py:4", True),
        ("GS101:model.py", False),
    ],
)
def test_rules(program, text, takes):
    rule = parse_rule(text)
    done = suppress([finding(program())], [rule])
    assert (done.kept == ()) == takes
    assert done.unused == (() if takes else (rule,))
    assert str(rule) == text


@each("text", ["", "101", "GS10", "GS101:train.py:x:y", "GS101 train.py"])
def test_invalid_rules_are_refused(text):
    with pytest.raises(RuleError):
        parse_rule(text)


def test_a_file_of_rules_counts_its_hits(program, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text("# ours\nGS101:train.py  # known\n\nGS120\n")
    first, second = read_rules(rules)
    assert first.origin == "rules.txt:2"
    file = program()
    done = suppress([finding(file), finding(file, line=1)], (first, second))
    assert done.hits == {first: 2}
    assert done.unused == (second,)


def test_a_baseline_survives_edits_elsewhere_and_not_of_the_lines(program, tmp_path):
    file, known = program(), tmp_path / "baseline.json"
    write_baseline(known, [finding(file)])
    done = suppress([finding(file)], baseline=read_baseline(known))
    assert (done.kept, done.known, done.gone) == ((), 1, 0)
    changed = program("0")
    done = suppress([finding(changed)], baseline=read_baseline(known))
    assert (len(done.kept), done.known, done.gone) == (1, 0, 1)


def test_invalid_baselines_are_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json"):
        read_baseline(tmp_path / "x.json")
