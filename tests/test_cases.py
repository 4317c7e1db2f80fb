"""Tables of cases: all are run, and those that failed are listed."""

import pytest

from cases import each


def test_every_failing_case_is_listed_and_no_other(tmp_path, monkeypatch):
    seen = []

    @each("number", [1, 2, 3, 4])
    @each(("word", "more"), [("a", 0), pytest.param("b", 1)])
    def check(tmp_path, monkeypatch, number, word, more):
        seen.append((number, word, tmp_path))
        monkeypatch.setenv("GRADSAN_CASE", word)
        if number == 3:
            pytest.skip("not here")
        assert (number, word) not in {(2, "b"), (4, "a")}
        if number == 4:
            pytest.fail("the last")

    with pytest.raises(pytest.fail.Exception) as caught:
        check(tmp_path=tmp_path, monkeypatch=monkeypatch)
    text = str(caught.value)
    assert len({folder for *_, folder in seen}) == len(seen) == 8
    assert "2 of 4 cases failed" in text
    assert "case 1: 2" in text
    assert "case 3: 4" in text
    assert "case 2: 3" not in text
    assert "case 1: 'b', 1" in text
    assert "the last" in text
    assert "GRADSAN_CASE" not in __import__("os").environ


def test_a_table_without_a_case_is_an_error():
    with pytest.raises(AssertionError, match="without a case"):
        each("number", [])
