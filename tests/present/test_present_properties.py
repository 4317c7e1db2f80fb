"""Any report on a terminal: it is drawn, and fits."""

import linecache

import pytest
import sample_reports
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gradsan.model import Diagnosis, Fix, Frame, Gradient, Label, Message, NamedTensor, Program, Report, Seen, Site, Why
from gradsan.present import render_json, render_terminal
from gradsan.present.terminal import MIN_WIDTH

# Named, as hypothesis would compute it from a codec, for seconds.
ANY = st.characters()
ODD = "\tab( )=张量门e\u0301👍🏽❤\ufe0f\x1b\u202e\x0c"
SOURCE_TEXT = st.text(st.sampled_from(ODD) | st.characters(exclude_characters="\r\n"), max_size=200)
NAMES = st.sampled_from(["<memory a>", "<memory b>", "<missing>"])
NUMBERS = st.integers(1, 9)
MAYBE_COLUMN = st.none() | st.integers(-3, 220)
MESSAGES = st.builds(lambda text: Message("sample.{text}", {"text": text}), st.text(ANY, max_size=150))
FRAMES = st.builds(
    Frame,
    NAMES | st.just("/a/" + "long/" * 30 + "train.py"),
    NUMBERS,
    st.text(ANY, max_size=20),
    MAYBE_COLUMN,
    st.none() | st.integers(0, 12) | st.just(10**6),
    MAYBE_COLUMN,
    st.booleans(),
)
ROLES = st.sampled_from(["saved", "written", "used", "bridge", "created", "freed", "suspect", "note"])
LABELS = st.builds(Label, ROLES, FRAMES, MESSAGES, st.none(), st.builds(Site, st.lists(FRAMES, max_size=5).map(tuple)))
FIXES = st.builds(
    Fix,
    st.just("kind"),
    st.sampled_from(["preserved", "changed"]),
    MESSAGES,
    how_changed=st.none() | MESSAGES,
    lines=st.lists(st.tuples(NAMES, NUMBERS, SOURCE_TEXT), max_size=3).map(tuple),
    diff=st.text(ANY, max_size=50),
)
TENSORS = st.builds(
    NamedTensor,
    st.none() | st.text(ANY, max_size=30),
    st.just((1, 2)),
    st.just("float32"),
    st.text(ANY, max_size=9),
    st.none() | st.text(ANY, max_size=9),
    st.none() | st.text(ANY, max_size=9),
)
DIAGNOSES = st.builds(
    Diagnosis,
    code=st.just("GS101"),
    cause=st.just("result_overwritten"),
    severity=st.sampled_from(["error", "warning", "note"]),
    silent=st.booleans(),
    title=MESSAGES,
    explanation=MESSAGES,
    labels=st.lists(LABELS, max_size=5).map(tuple),
    tensor=st.none() | TENSORS,
    why=st.none() | st.builds(Why, st.none() | st.text(ANY, max_size=99), MESSAGES),
    gradient=st.builds(Gradient, st.sampled_from(["raised", "wrong", "right", "unknown"]), st.none() | st.floats()),
    fixes=st.lists(FIXES, max_size=2).map(tuple),
    notes=st.lists(MESSAGES, max_size=2).map(tuple),
    count=st.integers(1, 10**9),
)
REPORTS = st.builds(
    Report,
    program=st.builds(Program),
    seen=st.builds(Seen, blind_spots=st.lists(MESSAGES, max_size=2).map(tuple)),
    diagnoses=st.lists(DIAGNOSES, max_size=2).map(tuple),
    gradsan=st.just("0"),
    torch=st.none(),
    python=st.just("3"),
)


@pytest.fixture(autouse=True)
def _any_words(monkeypatch):
    monkeypatch.setitem(sample_reports.WORDS, "{text}", "{text}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    made=REPORTS,
    sources=st.tuples(*[st.lists(SOURCE_TEXT, max_size=12)] * 2),
    width=st.integers(0, 160),
    language=st.sampled_from(["en", "zh"]),
    stacks=st.booleans(),
    ascii=st.booleans(),
)
def test_every_report_is_drawn_and_fits(made, sources, width, language, stacks, ascii):
    for name, lines in zip(("<memory a>", "<memory b>"), sources, strict=True):
        linecache.cache[name] = (1, None, [f"{line}\n" for line in lines], name)
    shown = render_terminal(made, language=language, color=False, width=width, stacks=stacks, ascii=ascii)
    assert "\x1b" not in shown
    for row in shown.split("\n"):
        assert cell_len(row) <= max(width, MIN_WIDTH)
    render_json(made, language=language)
