"""Reports of several ranks: equal findings once, who was first, and how many had it."""

import dataclasses

import pytest
from sample_reports import bridge, false_alarm, nothing_found, unknown_writer

from gradsan.model import Copies, Event, Program, Seen
from gradsan.present.json import plain
from gradsan.present.merge import merged
from gradsan.present.terminal import render_terminal


def at_step(made, step):
    events = (Event("used", 9, step),)
    return dataclasses.replace(made, diagnoses=tuple(dataclasses.replace(one, events=events) for one in made.diagnoses))


def test_one_report_stays_as_it_is():
    made = bridge()
    assert merged([("a", made)]) is made


def test_no_report_is_refused():
    with pytest.raises(ValueError):
        merged([])


def test_equal_findings_are_counted_once():
    [found] = merged([("rank0", bridge()), ("rank1", bridge())]).diagnoses
    assert found.count == 8
    assert found.sources == ("rank0", "rank1")
    assert found.labels == bridge().diagnoses[0].labels


def test_other_lines_roles_codes_severity_and_silence_are_other_findings():
    one = bridge().diagnoses[0]
    moved = dataclasses.replace(one.labels[0].frame, line=99)
    variants = (
        one,
        dataclasses.replace(one, code="GS110"),
        dataclasses.replace(one, silent=True),
        dataclasses.replace(one, severity="note"),
        dataclasses.replace(one, labels=one.labels[:2]),
        dataclasses.replace(one, labels=(dataclasses.replace(one.labels[0], frame=moved), *one.labels[1:])),
    )
    made = dataclasses.replace(bridge(), diagnoses=variants)
    assert len(merged([("a", made), ("b", made)]).diagnoses) == len(variants)


def test_without_places_findings_differ_by_their_words():
    one = dataclasses.replace(bridge().diagnoses[0], labels=())
    other = dataclasses.replace(one, title=plain("other"))
    made = dataclasses.replace(bridge(), diagnoses=(one, other))
    assert [found.count for found in merged([("a", made), ("b", made)]).diagnoses] == [8, 8]


def test_the_first_is_who_had_fewest_steps_behind_it():
    reports = [("rank0", at_step(bridge(), 5)), ("rank1", at_step(bridge(), 2)), ("rank2", nothing_found())]
    [found] = merged(reports).diagnoses
    assert found.sources == ("rank1", "rank0")
    note = found.notes[-1]
    assert note.key == "report.first_of_steps"
    assert note.values == {"first": "rank1", "count": 2, "total": 3, "step": 2}


def test_among_equals_the_first_is_who_was_named_first():
    [found] = merged([("b", at_step(bridge(), 3)), ("a", at_step(bridge(), 3))]).diagnoses
    assert found.sources == ("b", "a")


def test_a_finding_of_one_report_says_whose_it_is():
    first, second = merged([("a", bridge()), ("b", false_alarm())]).diagnoses
    assert (first.sources, second.sources) == (("a",), ("b",))
    assert second.notes[-1].values == {"first": "b", "count": 1, "total": 2}


def test_merged_reports_can_be_merged_again():
    pair = merged([("a", bridge()), ("b", bridge())])
    [found] = merged([("pair", pair), ("c", bridge())]).diagnoses
    assert found.sources == ("a", "b", "c")
    assert found.count == 12


def test_counts_are_added_and_blind_spots_are_said_once():
    spots = (plain("x"), plain("y"))
    one = dataclasses.replace(nothing_found(), seen=Seen(1, 2, 3, 4, blind_spots=spots[:1]))
    other = dataclasses.replace(nothing_found(), seen=Seen(10, 20, 30, 40, blind_spots=spots))
    assert merged([("a", one), ("b", other)]).seen == Seen(11, 22, 33, 44, blind_spots=spots, processes=2)


def test_copies_on_a_device_are_the_most_of_one_process():
    one = dataclasses.replace(nothing_found(), seen=Seen(copies=(Copies("cuda:0", 10, 1), Copies("cuda:1", 5, 0))))
    other = dataclasses.replace(nothing_found(), seen=Seen(copies=(Copies("cuda:0", 30, 2),)))
    both = merged([("a", one), ("b", other)])
    said = render_terminal(both, language="en", color=False, width=200, stacks=False)
    assert both.seen.copies == (Copies("cuda:0", 30, 3), Copies("cuda:1", 5, 0))
    assert "copies of up to 30 B on cuda:0, none of 3 values, copies of up to 5 B on cuda:1" in said


def test_one_failed_program_makes_a_failed_report():
    fine = dataclasses.replace(nothing_found(), program=Program(("fine.py",)))
    assert merged([("a", fine), ("b", bridge())]).program == bridge().program
    assert merged([("a", fine), ("b", unknown_writer())]).program == fine.program


def test_differing_versions_are_all_shown():
    other = dataclasses.replace(bridge(), torch="2.14.0", python="3.12.1")
    made = merged([("a", bridge()), ("b", other), ("c", bridge())])
    assert (made.torch, made.python) == ("2.13.0, 2.14.0", "3.11.7, 3.12.1")
