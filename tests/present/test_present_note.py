import pytest
from sample_reports import REPORTS, SOURCES, bridge, report, words

from gradsan.model import Diagnosis
from gradsan.present import short_note


@pytest.fixture(autouse=True)
def _in_sources(monkeypatch):
    monkeypatch.chdir(SOURCES)


def test_english():
    assert short_note(bridge().diagnoses[0], "en").splitlines() == [
        "gradsan: error[GS111]: this loss reaches back across an optimizer step",
        "  saved: rnn.py:10  out, h_next = rnn(x[i], h)",
        "  overwritten: rnn.py:13  opt.step()",
        "  needed: rnn.py:12  loss.backward(retain_graph=True)",
        "  help: cut the graph where the state is carried over",
    ]


def test_chinese():
    assert short_note(bridge().diagnoses[0], "zh").splitlines() == [
        "gradsan：错误[GS111]：这个损失跨过一次 optimizer step 连到了更早的计算图",
        "  保存：rnn.py:10  out, h_next = rnn(x[i], h)",
        "  覆盖：rnn.py:13  opt.step()",
        "  需要：rnn.py:12  loss.backward(retain_graph=True)",
        "  改法：在传递状态的地方切断计算图",
    ]


def test_several_writes_are_counted():
    diagnosis = bridge().diagnoses[0]
    writes = [label for label in diagnosis.labels if label.role == "written"]
    more = report(Diagnosis("GS111", "c", "error", False, diagnosis.title, diagnosis.explanation, tuple(writes * 3)))
    assert short_note(more.diagnoses[0], "en").splitlines()[1] == (
        "  overwritten: rnn.py:13  opt.step() (and 2 more places)"
    )


def test_two_to_five_lines():
    for make in REPORTS.values():
        for diagnosis in make().diagnoses:
            assert 2 <= len(short_note(diagnosis, "en").splitlines()) <= 5
    odd, plain = words("result of {op}", op="a\nb\x1b[0m"), words("result of {op}", op="a")
    bare = Diagnosis("GS101", "result_overwritten", "error", False, odd, plain, ())
    assert short_note(bare, "en").splitlines() == ["gradsan: error[GS101]: result of a b␛[0m", "  result of a"]
