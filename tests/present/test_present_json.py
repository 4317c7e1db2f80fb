import dataclasses
import json
import math
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from sample_reports import REPORTS, SOURCES, frame, label, report, two_files, words

import gradsan.present
from cases import each
from gradsan.model import Diagnosis, Fix, Frame, Gradient, Label, Site, Verification
from gradsan.present import render_json

SCHEMA = json.loads(files("gradsan.present").joinpath("report.schema.json").read_text(encoding="utf-8"))


def render(made, language="en", cwd=SOURCES):
    return json.loads(render_json(made, language=language, cwd=cwd))


def with_fix(fix):
    return report(dataclasses.replace(two_files().diagnoses[0], fixes=(fix,)))


def diff_of(lines, cwd=SOURCES, diff=""):
    fix = Fix("kind", "preserved", words("result of {op}", op="x"), lines=lines, diff=diff)
    return render(with_fix(fix), cwd=cwd)["diagnoses"][0]["fixes"][0]["diff"]


@each("language", ["en", "zh"])
@each("name", REPORTS)
def test_keeps_the_contract(name, language):
    written = render(REPORTS[name](), language)
    jsonschema.Draft202012Validator(SCHEMA).validate(written)
    _has_no_unknown_fields(written, SCHEMA)


def _has_no_unknown_fields(value, schema):
    """The schema names every field that is written, so that it cannot fall behind."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(value, dict):
        assert set(value) == set(schema["properties"]) == set(schema["required"])
        for name, inner in value.items():
            _has_no_unknown_fields(inner, schema["properties"][name])
    if isinstance(value, list):
        for inner in value:
            _has_no_unknown_fields(inner, schema["items"])


def test_the_schema_refuses_what_breaks_the_contract():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for spoil in (
        lambda made: made.update(schema="gradsan.report/2"),
        lambda made: made["diagnoses"][0]["labels"][0].update(role="victim"),
        lambda made: made["diagnoses"][0]["labels"][0].update(line=0),
        lambda made: made["diagnoses"][0]["fixes"][0].pop("verification"),
    ):
        made = render(two_files())
        spoil(made)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(made, SCHEMA)


def test_whole_text(golden):
    assert render_json(two_files(), language="zh", cwd=SOURCES) == golden


def test_equal_reports_give_equal_text():
    assert render_json(two_files(), language="en", cwd=SOURCES) == render_json(two_files(), language="en", cwd=SOURCES)


def test_files_are_relative_only_below_the_working_directory(tmp_path):
    def first_file(cwd):
        return render(two_files(), cwd=cwd)["diagnoses"][0]["labels"][0]["file"]

    assert first_file(SOURCES) == "model.py"
    assert first_file(SOURCES.parent) == "sources/model.py"
    assert first_file(tmp_path) == str(SOURCES / "model.py")
    (tmp_path / "link").symlink_to(SOURCES)
    assert first_file(tmp_path / "link") == "model.py"


def test_works_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    written = render(two_files(), cwd=None)
    assert written["diagnoses"][0]["labels"][0]["file"] == str(SOURCES / "model.py")


def test_source_is_stripped_and_null_where_it_cannot_be_read():
    unreadable = Label("note", Frame("<string>", 3, "<module>"), words("result of {op}", op="x"))
    labels = render(
        report(dataclasses.replace(two_files().diagnoses[0], labels=(*two_files().diagnoses[0].labels, unreadable)))
    )
    sources = [shown["source"] for shown in labels["diagnoses"][0]["labels"]]
    assert sources == ["return self.net(image.flatten(1))", "d_optimizer.step()", "g_loss.backward()", None]


def test_stacks_hold_no_frame_of_gradsan():
    ours = Frame(str(Path(gradsan.present.__file__).parent.parent / "record" / "writes.py"), 10, "pack")
    where = frame("gan.py", 16, "d_optimizer.step()", "train_step")
    shown = Label("written", where, words("result of {op}", op="x"), site=Site((ours, where, ours)))
    diagnosis = dataclasses.replace(two_files().diagnoses[0], labels=(shown,))
    stack = render(report(diagnosis))["diagnoses"][0]["labels"][0]["stack"]
    assert stack == [
        {
            "file": "gan.py",
            "line": 16,
            "function": "train_step",
            "column": 5,
            "text": "    d_optimizer.step()",
            "user": True,
        }
    ]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(odd):
    fix = Fix(
        "kind", "changed", words("result of {op}", op="x"), verification=Verification("failed", "", odd, odd, odd)
    )
    diagnosis = dataclasses.replace(two_files().diagnoses[0], gradient=Gradient("wrong", odd), fixes=(fix,))
    written = render(report(diagnosis))["diagnoses"][0]
    assert written["gradient"]["relative_error"] is None
    assert set(list(written["fixes"][0]["verification"].values())[2:-1]) == {None}


def test_text_that_utf8_cannot_carry_is_escaped():
    made = report(label_diagnosis("caf\udce9.py"))
    assert render_json(made, language="en", cwd=SOURCES).encode("utf-8")


def label_diagnosis(file):
    message = words("result of {op}", op="x")
    return Diagnosis(
        "GS101", "result_overwritten", "error", False, message, message, (label("used", Frame(file, 1, "f"), message),)
    )


def test_diff_of_changed_lines():
    gan = str(SOURCES / "gan.py")
    assert diff_of(((gan, 16, ""), (gan, 20, "    g_optimizer.step()\n    d_optimizer.step()"))) == (
        "--- a/gan.py\n"
        "+++ b/gan.py\n"
        "@@ -13,11 +13,11 @@\n"
        " \n"
        "     d_optimizer.zero_grad()\n"
        "     d_loss.backward(retain_graph=True)\n"
        "-    d_optimizer.step()\n"
        " \n"
        "     g_optimizer.zero_grad()\n"
        "     g_loss.backward()\n"
        "     g_optimizer.step()\n"
        "+    d_optimizer.step()\n"
        " \n"
        " \n"
        " def main():\n"
    )


def test_a_diff_that_is_given_stays():
    assert diff_of(((str(SOURCES / "gan.py"), 16, "x"),), diff="--- a/x\n+++ b/x\n") == "--- a/x\n+++ b/x\n"


def test_no_diff_without_lines_or_source():
    assert diff_of(()) == ""
    assert diff_of((("<string>", 1, "x = 1"),)) == ""
    assert diff_of(((str(SOURCES / "gan.py"), 4000, "x = 1"),)) == ""


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diff")
@each("end", ["\n", ""])
@each("changed", [1, 2, 12, 11])
def test_git_applies_the_diff(tmp_path, end, changed):
    lines = [f"x{number} = {number}" for number in range(1, 13)]
    file = tmp_path / "train.py"
    file.write_text("\n".join(lines) + end)
    lines[changed - 1] = "y = 0"
    diff = diff_of(((str(file), changed, "y = 0"),), cwd=tmp_path)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    assert file.read_text() == "\n".join(lines) + end
