"""A finding and a sentence as text: what ``print`` shows of them."""

from gradsan.model import Diagnosis, Frame, Label, Message


def test_a_diagnosis_and_its_title_print_as_words(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    title = Message("title.result_overwritten", {"name": "h", "op": "sigmoid"})
    place = Label("written", Frame("model.py", 7, "forward", is_user=True), Message("label.leaf_written"))
    found = Diagnosis("GS101", "result_overwritten", "error", False, title, title, (place,))
    assert str(title) == "the result of sigmoid was overwritten in place, and its backward needs it"
    assert str(found).splitlines() == [f"gradsan: error[GS101]: {title}", "  overwritten: model.py:7"]
