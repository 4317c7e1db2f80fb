import copy
import json

import pytest
from sample_reports import REPORTS, SOURCES, bridge, two_files

from cases import each
from gradsan.model import Event, Frame, PathNode
from gradsan.present import render_json, render_terminal
from gradsan.present.json import ReadError, from_dict, read_report
from gradsan.source.tree import recorded_lines, source_line


def written(made, language="en"):
    return render_json(made, language=language, cwd=SOURCES)


def with_history(made):
    import dataclasses

    frame = Frame(str(SOURCES / "rnn.py"), 10, "f", is_user=True)
    events = (
        Event("saved", 3, 0, "MmBackward0", 1, frame),
        Event("written", 4, 1, "mul_", None, None, touches=False),
        Event("used", 9, 1, "MmBackward0", 2, frame),
    )
    way = (
        PathNode("loss", None, 1),
        PathNode("gap", nodes=0),
        PathNode("node", "AddBackward0", frame=frame),
        PathNode("repeat", "MulBackward0 → TanhBackward0", count=400, nodes=800),
        PathNode("gap", nodes=7),
        PathNode("bridge", "h"),
        PathNode("saved", "MmBackward0", 0, frame=frame),
    )
    return dataclasses.replace(
        made, diagnoses=tuple(dataclasses.replace(one, events=events, way=way) for one in made.diagnoses)
    )


@each("language", ["en", "zh"])
@each("name", REPORTS)
def test_writing_reading_and_writing_again_gives_the_same_text(name, language):
    text = written(with_history(REPORTS[name]()), language)
    recorded = from_dict(json.loads(text))
    with recorded_lines(recorded.lines):
        # Another language than the sentences: they stay as they are.
        assert render_json(recorded.report, language="zh" if language == "en" else "en", cwd=SOURCES) == text


@each("name", REPORTS)
def test_text_from_json_is_the_text_of_the_run(name, monkeypatch, tmp_path):
    made = REPORTS[name]()
    shown = {"language": "en", "color": False, "width": 100, "stacks": False}
    direct = render_terminal(made, cwd=SOURCES, **shown)
    recorded = from_dict(json.loads(written(made)))
    # Where the files are no longer to be had.
    monkeypatch.chdir(tmp_path)
    with recorded_lines(recorded.lines):
        again = render_terminal(recorded.report, cwd=tmp_path, **shown)
    assert again == direct


def test_recorded_lines_win_over_the_file_and_only_meanwhile():
    file = str(SOURCES / "rnn.py")
    before = source_line(file, 10)
    with recorded_lines({(file, 10): "as it was"}):
        assert source_line(file, 10) == "as it was"
        assert source_line(file, 12) is None, "it may be another line by now"
        assert source_line(str(SOURCES / "gan.py"), 12) is not None
    assert source_line(file, 10) == before


def test_fields_that_are_not_known_are_passed_over():
    data = json.loads(written(two_files()))
    extended = copy.deepcopy(data)
    extended["later"] = {"x": 1}
    extended["diagnoses"][0]["later"] = extended["diagnoses"][0]["labels"][0]["later"] = [1]
    assert from_dict(extended) == from_dict(data)


def test_an_early_report_without_the_added_fields_is_read():
    data = json.loads(written(bridge()))
    for diagnosis in data["diagnoses"]:
        for name in ("events", "way", "sources"):
            del diagnosis[name]
        for label in diagnosis["labels"]:
            del label["lines"]
            for frame in label["stack"]:
                del frame["user"]
        for fix in diagnosis["fixes"]:
            del fix["lines"]
    recorded = from_dict(data)
    with recorded_lines(recorded.lines):
        shown = render_terminal(recorded.report, language="en", color=False, width=100, stacks=False)
    assert "h = h_next" in shown
    assert "+    h = h_next.detach()" in shown


@each(
    ("content", "key"),
    [
        (None, "report.unreadable"),
        (b"\xff\xfe\x00", "report.unreadable"),
        (b"", "report.no_json"),
        (b"{", "report.no_json"),
        (b"[" * 100_000, "report.no_json"),
        (b"[]", "report.no_report"),
        (b"{}", "report.no_report"),
        (b'{"schema": "gradsan.report/2"}', "report.other_schema"),
        (b'{"schema": "gradsan.report/1"}', "report.broken"),
    ],
)
def test_unreadable_reports_give_one_sentence(tmp_path, content, key):
    file = tmp_path / "report.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ReadError) as caught:
        read_report(file)
    assert caught.value.message.key == key
    assert caught.value.message.values["path"] == file


@each(
    "spoil",
    [
        lambda one: one.update(severity="fatal"),
        lambda one: one.update(count="4"),
        lambda one: one.update(labels=None),
        lambda one: one["labels"][0].update(line=True),
        lambda one: one["labels"][0].update(role="victim"),
        lambda one: one.update(gradient=[]),
        lambda one: one.pop("title"),
    ],
)
def test_a_broken_contract_is_said(tmp_path, spoil):
    data = json.loads(written(two_files()))
    spoil(data["diagnoses"][0])
    file = tmp_path / "report.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ReadError) as caught:
        read_report(file)
    assert caught.value.message.key == "report.broken"
