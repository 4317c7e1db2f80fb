"""SARIF: held against the standard's own schema, and against what editors make of it."""

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from hostile import hostile
from sample_reports import REPORTS, SOURCES, bridge, nothing_found, same_line, two_files, words
from test_read_json import with_history

from cases import each
from gradsan.model import Diagnosis, Fix, Frame, Label
from gradsan.present import render_sarif

SCHEMA = json.loads((Path(__file__).parent / "data" / "sarif-2.1.0.json").read_text(encoding="utf-8"))


def log(made, language="en", cwd=SOURCES):
    return json.loads(render_sarif(made, language=language, cwd=cwd))


def result(made, **settings):
    [run] = log(made, **settings)["runs"]
    return run["results"][0]


def with_fix(**parts):
    made = bridge()
    fix = Fix("kind", "preserved", words("result of {op}", op="x"), **parts)
    return dataclasses.replace(made, diagnoses=(dataclasses.replace(made.diagnoses[0], fixes=(fix,)),))


@each("language", ["en", "zh"])
@each("name", REPORTS)
def test_keeps_the_standard(name, language):
    jsonschema.Draft202012Validator(SCHEMA).validate(log(with_history(REPORTS[name]()), language))


def test_keeps_the_standard_whatever_the_texts_are():
    jsonschema.Draft202012Validator(SCHEMA).validate(log(hostile()))


def test_the_schema_refuses_what_breaks_the_standard():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for spoil in (
        lambda made: made.update(version="2.0.0"),
        lambda made: made["runs"][0]["results"][0].update(level="fatal"),
        lambda made: made["runs"][0]["results"][0].update(unknown=1),
        lambda made: made["runs"][0]["results"][0].pop("message"),
    ):
        made = log(bridge())
        spoil(made)
        assert not validator.is_valid(made)


def test_a_rule_for_each_code_with_the_page_as_help():
    made = bridge()
    both = dataclasses.replace(made, diagnoses=(*made.diagnoses, *same_line().diagnoses, *made.diagnoses))
    [run] = log(both)["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["GS101", "GS111"]
    assert rules[1]["help"]["markdown"].startswith("# GS111")
    assert [(one["ruleId"], rules[one["ruleIndex"]]["id"]) for one in run["results"]] == [
        ("GS111", "GS111"),
        ("GS101", "GS101"),
        ("GS111", "GS111"),
    ]


def test_the_site_is_named_where_the_package_knows_it(monkeypatch):
    monkeypatch.setattr("gradsan.present.sarif._HOME", "https://example.org/gradsan/")
    driver = log(bridge())["runs"][0]["tool"]["driver"]
    assert driver["informationUri"] == "https://example.org/gradsan/"
    assert driver["rules"][0]["helpUri"] == "https://example.org/gradsan/reference/codes/GS111.html"


def test_a_code_without_a_page_has_a_rule_all_the_same():
    message = words("result of {op}", op="x")
    odd = Diagnosis("GS999", "something_new", "note", False, message, message, ())
    made = log(dataclasses.replace(bridge(), diagnoses=(odd,)))
    jsonschema.validate(made, SCHEMA)
    assert made["runs"][0]["tool"]["driver"]["rules"][0]["id"] == "GS999"
    assert made["runs"][0]["results"][0]["level"] == "note"


def test_the_use_is_the_place_and_the_save_is_related():
    found = result(bridge())
    [place] = found["locations"]
    assert place["physicalLocation"]["artifactLocation"] == {"uri": "rnn.py", "uriBaseId": "SRCROOT"}
    assert place["physicalLocation"]["region"]["startLine"] == 12
    related = found["relatedLocations"]
    assert [(one["id"], one["physicalLocation"]["region"]["startLine"]) for one in related] == [
        (1, 10),
        (2, 13),
        (3, 14),
    ]
    assert related[0]["message"]["text"].startswith("saved:")


def test_the_events_are_a_code_flow_in_their_order():
    [flow] = result(bridge())["codeFlows"]
    steps = flow["threadFlows"][0]["locations"]
    assert [step["executionOrder"] for step in steps] == [1, 2, 3, 4]
    assert [step["kinds"] for step in steps] == [["saved"], ["written"], ["used"], ["bridge"]]


def test_stacks_have_the_innermost_frame_first():
    [stack] = result(two_files())["stacks"]
    lines = [frame["location"]["physicalLocation"]["region"]["startLine"] for frame in stack["frames"]]
    assert lines == [19, 27, 31]


def test_absolute_files_are_file_uris_and_odd_names_are_quoted():
    message = words("result of {op}", op="x")
    labels = tuple(
        Label("used", Frame(name, 3, "f"), message) for name in ("/opt/a b/模型.py", "<string>", "caf\udce9.py")
    )
    made = dataclasses.replace(bridge(), diagnoses=(dataclasses.replace(bridge().diagnoses[0], labels=labels),))
    jsonschema.validate(log(made), SCHEMA)
    flow = result(made)["codeFlows"][0]["threadFlows"][0]["locations"]
    places = [step["location"]["physicalLocation"]["artifactLocation"] for step in flow]
    assert places == [
        {"uri": "file:///opt/a%20b/%E6%A8%A1%E5%9E%8B.py"},
        {"uri": "%3Cstring%3E", "uriBaseId": "SRCROOT"},
        {"uri": "caf%E9.py", "uriBaseId": "SRCROOT"},
    ]


def apply(text, changes):
    """What an editor makes of the replacements of one file."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for change in sorted(changes, key=lambda one: one["deletedRegion"]["startLine"], reverse=True):
        region = change["deletedRegion"]
        first, last = region["startLine"], region.get("endLine", region["startLine"])
        begin = starts[first - 1] + region.get("startColumn", 1) - 1
        if "endColumn" in region:
            end = starts[last - 1] + region["endColumn"] - 1
        else:
            end = starts[last - 1] + len(lines[last - 1].rstrip("\r\n"))
        text = text[:begin] + change.get("insertedContent", {}).get("text", "") + text[end:]
    return text


def replacements(found):
    [fix] = found["fixes"]
    return {change["artifactLocation"]["uri"]: change["replacements"] for change in fix["artifactChanges"]}


@pytest.mark.parametrize("as_diff", [False, True])
def test_fixes_replace_lines(as_diff):
    gan = SOURCES / "gan.py"
    lines = ((str(gan), 16, ""), (str(gan), 20, "    g_optimizer.step()\n    d_optimizer.step()"))
    made = with_fix(lines=lines)
    if as_diff:
        from gradsan.present._fixes import diff_of

        made = with_fix(diff=diff_of(made.diagnoses[0].fixes[0], SOURCES))
    changes = replacements(result(made))
    assert set(changes) == {"gan.py"}
    expected = gan.read_text(encoding="utf-8").split("\n")
    expected[19:20] = ["    g_optimizer.step()", "    d_optimizer.step()"]
    del expected[15]
    assert apply(gan.read_text(encoding="utf-8"), changes["gan.py"]) == "\n".join(expected)
    jsonschema.validate(log(made), SCHEMA)


def test_a_diff_of_several_files_and_hunks_is_replaced_as_git_applies_it(tmp_path):
    import difflib

    one = [f"-- {number}" for number in range(40)]
    other = ["++ a", "b", "c"]
    new_one = [*one[:3], "-- new", *one[4:30], *one[31:35], "++ added", "-- added", *one[35:]]
    new_other = ["first", *other[1:]]
    diff = "".join(
        "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")) + "\n"
        for name, old, new in (("one.py", one, new_one), ("dir/other.py", other, new_other))
    )
    changes = replacements(result(with_fix(diff=diff)))
    for name, old, new in (("one.py", one, new_one), ("dir/other.py", other, new_other)):
        text = "".join(f"{line}\n" for line in old)
        assert apply(text, changes[name]) == "".join(f"{line}\n" for line in new)


def test_without_lines_there_is_no_fix():
    assert "fixes" not in result(with_fix())


def test_the_fingerprint_outlives_lines_added_above_but_not_another_code(tmp_path):
    def fingerprint(text, code="GS111"):
        file = tmp_path / "train.py"
        file.write_text(text)
        line = text[: text.index("h = h_next")].count("\n") + 1
        label = Label("used", Frame(str(file), line, "f"), words("result of {op}", op="x"))
        found = dataclasses.replace(bridge().diagnoses[0], labels=(label,), code=code)
        made = result(dataclasses.replace(bridge(), diagnoses=(found,)), cwd=tmp_path)
        return made["partialFingerprints"]["gradsanPlaces/v1"]

    first = fingerprint("h = h_next\n")
    assert fingerprint("import os\n\nh = h_next\n") == first
    assert fingerprint("h = h_next\n", "GS110") != first
    assert fingerprint("h = h_next  # other\n") != first


def test_an_invocation_holds_the_end_of_the_program_and_its_blind_spots():
    [run] = log(REPORTS["unknown_writer"]())["runs"]
    [told] = run["invocations"]
    assert told["executionSuccessful"] is True
    assert "raw pointers" in told["toolExecutionNotifications"][0]["message"]["text"]
    [run] = log(bridge())["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["arguments"] == ["train.py", "--epochs", "3"]


def test_nothing_found_is_a_run_without_results():
    [run] = log(nothing_found())["runs"]
    assert run["results"] == []
