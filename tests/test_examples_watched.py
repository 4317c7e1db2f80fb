"""The programs in examples/ under ``gradsan run``: they end as they do without it, and the report says why."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from example_programs import (
    BROKEN,
    EXAMPLES,
    NAMES,
    RIGHT,
    ROOT,
    Watched,
    case_id,
    last_line,
    refresh_reports,
    run_example,
    watch_example,
)

Place = tuple[str, str, str, str]
"""Role, file below examples/, function (without its class), and the source line as it stands there."""


@dataclass(frozen=True)
class Diagnosis:
    code: str
    tensor: str
    places: tuple[Place, ...]


def augmented(saved_at: str) -> Diagnosis:
    write = ("written", "image_classifier/augment.py", "__call__")
    return Diagnosis(
        "GS105",
        "images",
        (
            ("saved", "image_classifier/models.py", "forward", saved_at),
            (*write, "images[flipped] = images[flipped].flip(-1)"),
            (*write, "images *= gain"),
            (*write, "images[i, :, y : y + self.cutout, x : x + self.cutout] = 0.0"),
            ("used", "image_classifier/train.py", "train_one_epoch", "loss.backward()"),
        ),
    )


def carried(weight: str) -> Diagnosis:
    return Diagnosis(
        "GS111",
        f"model.rnn.{weight}",
        (
            ("saved", "rnn_sequence/model.py", "forward", "out, h = self.rnn(x, h)"),
            ("written", "rnn_sequence/train.py", "main", "optimizer.step()"),
            ("used", "rnn_sequence/train.py", "main", "loss.backward(retain_graph=True)"),
            ("bridge", "rnn_sequence/train.py", "main", "h_cur = h_next"),
        ),
    )


DIAGNOSES: dict[tuple[str, ...], Diagnosis | str] = {
    ("gan",): Diagnosis(
        "GS110",
        "D.net.8.weight",
        (
            ("saved", "gan/models.py", "forward", "return self.net(images).flatten()"),
            ("written", "gan/train.py", "main", "d_optimizer.step()"),
            ("used", "gan/train.py", "main", "g_loss.backward()"),
        ),
    ),
    ("hierarchical_bert",): Diagnosis(
        "GS105",
        "input_ids",
        (
            (
                "saved",
                "hierarchical_bert/model.py",
                "encode",
                "return self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output",
            ),
            ("written", "hierarchical_bert/train.py", "append_label", "input_ids[rows, end] = LABEL_TOKENS[field]"),
            ("used", "hierarchical_bert/train.py", "train", "loss.backward()"),
        ),
    ),
    ("image_classifier",): augmented("return self.fc(images.flatten(1))"),
    ("image_classifier", "--model", "cnn"): augmented("x = F.max_pool2d(F.relu(self.conv1(images), inplace=True), 2)"),
    ("leaf_update",): Diagnosis(
        "GS110",
        "params[2]",
        (
            ("saved", "leaf_update/train.py", "predict", "return torch.tanh(x @ w1 + b1) @ w2 + b2"),
            ("written", "leaf_update/train.py", "step_per_target", "p -= lr * p.grad"),
            ("used", "leaf_update/train.py", "step_per_target", "loss.backward(retain_graph=True)"),
        ),
    ),
    # Stopped at the statement itself, before any backward reads a stale value.
    ("leaf_update", "--update", "in-place"): "GS301",
    ("leaf_update", "--update", "rebind"): "GS409",
    ("rnn_sequence",): carried("weight_hh_l0"),
    ("rnn_sequence", "--cell", "lstm"): carried("weight_ih_l0"),
}


def failure_in(stderr: str) -> str:
    """From the traceback to its last line; the report, and what the program wrote before, left out."""
    traceback = stderr[stderr.index("Traceback (most recent call last):") :]
    report = refresh_reports.report_in(stderr)
    return traceback.rstrip().removesuffix(report).rstrip()


def place_of(label: dict[str, Any]) -> Place:
    """A label of the JSON report, its line read from the file it names."""
    file = ROOT / label["file"]
    line = file.read_text(encoding="utf-8").splitlines()[label["line"] - 1].strip()
    assert label["source"].strip() == line
    return label["role"], file.relative_to(EXAMPLES).as_posix(), label["function"].rpartition(".")[2], line


def check(watched: Watched, expected: Diagnosis) -> None:
    [found] = watched.report["diagnoses"]
    assert found["code"] == expected.code
    assert (found["severity"], found["silent"]) == ("error", False)
    assert found["tensor"]["name"] == expected.tensor
    assert tuple(place_of(label) for label in found["labels"]) == expected.places
    shown = refresh_reports.report_in(watched.done.stderr)
    assert re.match(rf"\w+\[{expected.code}\][:：] ?{re.escape(found['title'][:20])}", shown)
    assert expected.tensor in shown


@pytest.mark.parametrize(("example", "arguments", "stopped_at", "error"), BROKEN, ids=case_id)
def test_broken_program_ends_as_without_gradsan(
    example: str, arguments: tuple[str, ...], stopped_at: str, error: str
) -> None:
    plain = run_example(example, "train.py", *arguments)
    done, report = watch_example(example, "train.py", *arguments)
    assert done.returncode == plain.returncode == 1
    assert done.stdout == plain.stdout
    assert failure_in(done.stderr) == failure_in(plain.stderr)

    raised = last_line(failure_in(done.stderr))
    assert re.fullmatch(error, raised)
    kind, _, message = raised.partition(": ")
    exception = report["program"]["exception"]
    assert (report["program"]["outcome"], exception["type"]) == ("failed", kind)
    assert exception["message"] == message


@pytest.mark.parametrize(("example", "arguments"), [case[:2] for case in BROKEN], ids=case_id)
def test_broken_program_gets_its_diagnosis(example: str, arguments: tuple[str, ...]) -> None:
    watched = watch_example(example, "train.py", *arguments)
    case = (example, *arguments)
    expected = DIAGNOSES[case]
    if isinstance(expected, str):
        assert [found["code"] for found in watched.report["diagnoses"]] == [expected]
    else:
        check(watched, expected)


def test_the_same_diagnosis_in_chinese() -> None:
    english = watch_example("rnn_sequence", "train.py")
    chinese = watch_example("rnn_sequence", "train.py", language="zh")
    check(chinese, carried("weight_hh_l0"))
    assert failure_in(chinese.done.stderr) == failure_in(english.done.stderr)

    [in_english], [in_chinese] = english.report["diagnoses"], chinese.report["diagnoses"]
    for said, said_in_english in (
        (in_chinese["title"], in_english["title"]),
        (in_chinese["explanation"], in_english["explanation"]),
        *((a["message"], b["message"]) for a, b in zip(in_chinese["labels"], in_english["labels"], strict=True)),
        *((a["summary"], b["summary"]) for a, b in zip(in_chinese["fixes"], in_english["fixes"], strict=True)),
    ):
        assert re.search("[一-鿿]", said)
        assert not re.search("[一-鿿]", said_in_english)
    assert in_chinese["title"] in chinese.done.stderr
    assert [fix["kind"] for fix in in_chinese["fixes"]] == [fix["kind"] for fix in in_english["fixes"]]


@pytest.mark.parametrize(("example", "arguments"), [case[:2] for case in RIGHT], ids=case_id)
def test_fixed_program_runs_the_same_and_nothing_is_found(example: str, arguments: tuple[str, ...]) -> None:
    plain = run_example(example, "fixed.py", *arguments)
    done, report = watch_example(example, "fixed.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert report["diagnoses"] == []
    assert refresh_reports.report_in(done.stderr) == ""
    assert report["seen"]["saves"] > 0
    assert report["seen"]["backwards"] > 0


def test_a_failure_that_the_program_catches_is_reported_all_the_same() -> None:
    done, report = watch_example("image_classifier", "fixed.py", "--compare")
    assert done.returncode == 66, done.stderr
    assert done.stdout == run_example("image_classifier", "fixed.py", "--compare").stdout
    # --compare tries .data, too, which is the wrong way out of the error.
    assert [found["code"] for found in report["diagnoses"]] == ["GS202", "GS105"]
    assert report["program"].pop("started")
    assert report["program"].pop("seconds") > 0
    assert report["program"] == {
        "argv": ["examples/image_classifier/fixed.py", "--compare"],
        "outcome": "finished",
        "exception": None,
        "ended": True,
    }


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the reports shown have columns, which Python 3.10 does not know"
)
@pytest.mark.parametrize("example", NAMES)
def test_readmes_show_what_gradsan_says(example: str) -> None:
    watched = watch_example(example, "train.py")
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if watched.report["torch"].partition("+")[0] != pinned[1]:
        pytest.skip(f"the reports shown are those of torch {pinned[1]}")
    report = refresh_reports.report_in(watched.done.stderr)
    for path in refresh_reports.READMES[example]:
        assert refresh_reports.shown_report((ROOT / path).read_text(encoding="utf-8")) == report, (
            f"{path} shows an older report: python tools/refresh_reports.py"
        )


def test_a_report_is_put_between_the_marks_and_nothing_else_changes() -> None:
    report = "error[GS101]: a title\n   ┌─ a.py:1:1"
    empty = "# title\n\n<!-- report:start -->\n<!-- report:end -->\n\ntext\n"
    full = refresh_reports.with_report(empty, report)
    assert full == f"# title\n\n<!-- report:start -->\n```text\n{report}\n```\n<!-- report:end -->\n\ntext\n"
    assert refresh_reports.with_report(full, report) == full
    assert refresh_reports.shown_report(full) == report
    assert refresh_reports.shown_report(empty) == ""


@pytest.mark.parametrize(
    "readme",
    ["no marks", "<!-- report:start -->", "<!-- report:end -->\n<!-- report:start -->", 2 * "<!-- report:start -->\n"],
)
def test_a_file_without_one_pair_of_marks_is_refused(readme: str) -> None:
    with pytest.raises(ValueError, match="report:start"):
        refresh_reports.with_report(readme, "x")


def test_the_first_title_begins_the_report() -> None:
    stderr = (
        "epoch 1\nTraceback (most recent call last):\nRuntimeError: no error[GS101]: here\nwarning[GS112]: b\n\nx\n"
    )
    assert refresh_reports.report_in(stderr) == "warning[GS112]: b\n\nx"
    assert refresh_reports.report_in("Traceback\nRuntimeError: x\n") == ""


def test_every_broken_program_has_an_expectation() -> None:
    assert set(DIAGNOSES) == {(example, *arguments) for example, arguments, _, _ in BROKEN}
    assert {path for paths in refresh_reports.READMES.values() for path in paths} == {
        "README.md",
        *(Path("examples", name, "README.md").as_posix() for name in NAMES),
    }
