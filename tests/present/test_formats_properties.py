"""Any report in every format: it is rendered, keeps the format's rules, and JSON is read back as written."""

import dataclasses
import json
import linecache
from pathlib import Path

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_github import COMMAND
from test_html import Page
from test_present_properties import ANY, FRAMES, REPORTS, SOURCE_TEXT, _any_words  # noqa: F401 (a fixture)

from gradsan.model import Event, PathNode
from gradsan.present import render_github, render_html, render_json, render_sarif
from gradsan.present.json import from_dict
from gradsan.source.tree import recorded_lines

SARIF = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent / "data" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
)
COUNTS = st.integers(0, 10**9)
NAMES = st.none() | st.text(ANY, max_size=20)
EVENTS = st.builds(
    Event,
    st.sampled_from(["saved", "written", "used", "step", "backward"]),
    COUNTS,
    COUNTS,
    NAMES,
    st.none() | COUNTS,
    st.none() | FRAMES,
    st.booleans(),
)
KNOTS = st.builds(PathNode, st.sampled_from(["loss", "gap", "node", "bridge", "saved"]), NAMES, st.none() | COUNTS)


def with_history(made, events, way):
    found = (dataclasses.replace(one, events=tuple(events), way=tuple(way)) for one in made.diagnoses)
    return dataclasses.replace(made, diagnoses=tuple(found))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    made=REPORTS,
    events=st.lists(EVENTS, max_size=20),
    way=st.lists(KNOTS, max_size=5),
    sources=st.tuples(*[st.lists(SOURCE_TEXT, max_size=12)] * 2),
    language=st.sampled_from(["en", "zh"]),
)
def test_every_form_of_every_report(made, events, way, sources, language):
    for name, lines in zip(("<memory a>", "<memory b>"), sources, strict=True):
        linecache.cache[name] = (1, None, [f"{line}\n" for line in lines], name)
    made = with_history(made, events, way)

    page = Page(render_html(made, language=language))
    assert page.loads == []
    assert [tag for tag, _ in page.elements].count("script") == 2

    SARIF.validate(json.loads(render_sarif(made, language=language)))

    rows = render_github(made, language=language).split("\n")
    assert rows.pop() == ""
    assert all(COMMAND.fullmatch(row) for row in rows)

    text = render_json(made, language=language)
    recorded = from_dict(json.loads(text))
    with recorded_lines(recorded.lines):
        assert json.loads(render_json(recorded.report, language=language)) == json.loads(text)
