"""Names of parameters as adapters make them: short in sentences, whole once, no word broken."""

import itertools
from dataclasses import replace

import pytest
from sample_reports import REPORTS as SAMPLES

from gradsan.model import Message, Report
from gradsan.present import render_terminal

LONG = "model.base_model.model.model.layers.1.self_attn.v_proj.base_layer.weight"
SHORT = "…layers.1.self_attn.v_proj.base_layer.weight"


def renamed(value, old):
    if isinstance(value, str):
        return LONG if value == old else value
    if isinstance(value, Message):
        return Message(value.key, {key: renamed(one, old) for key, one in value.values.items()})
    return value


def with_long_name(report: Report) -> Report:
    def of(one):
        old = one.tensor.name
        labels = tuple(replace(label, message=renamed(label.message, old)) for label in one.labels)
        return replace(one, labels=labels, tensor=replace(one.tensor, name=LONG))

    return replace(report, diagnoses=tuple(of(one) for one in report.diagnoses if one.tensor and one.tensor.name))


REPORTS = {name: with_long_name(sample() if callable(sample) else sample) for name, sample in SAMPLES.items()}


@pytest.mark.parametrize("name", [name for name, report in REPORTS.items() if report.diagnoses])
@pytest.mark.parametrize("width", [80, 100])
def test_a_long_name_is_whole_once_and_never_broken(name, width):
    report = REPORTS[name]
    said = render_terminal(report, language="en", color=False, width=width, stacks=False)
    assert said.replace("\n", "").count(LONG) <= 2 * len(report.diagnoses), "the tensor's line, and a title"
    for line, after in itertools.pairwise(said.splitlines()):
        assert not (SHORT not in line and "…layers" in line and "weight" not in line), f"broken: {line}\n{after}"
