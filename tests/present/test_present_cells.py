from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from gradsan.present import needs_ascii
from gradsan.present._cells import clean, display, width_of, wrap

any_text = st.text(st.characters(), max_size=60)


def test_wrap_at_spaces():
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("one two three", 8, first=3) == ["one", "two", "three"]
    assert wrap("", 8) == [""]


def test_wrap_cuts_words_that_fit_nowhere():
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"]


def test_wrap_starts_on_the_next_line_where_the_word_fits_there():
    assert wrap("parameter", 20, first=4) == ["", "parameter"]


def test_wrap_chinese_between_characters_but_not_before_punctuation():
    assert wrap("梯度是错的，训练仍在继续", 10) == ["梯度是错", "的，训练仍", "在继续"]
    assert wrap("保存的（张量）", 8) == ["保存的", "（张量）"]


def test_tabs_go_to_the_next_stop():
    line = display("\tx\ty")
    assert line.cut(0, line.width) == "    x   y"
    assert line.offsets == (0, 4, 5, 8, 9)


def test_a_wide_character_cut_in_two_becomes_a_space():
    assert display("a张b").cut(0, 2) == "a "
    assert display("a张b").cut(2, 4) == " b"


def test_control_characters_cannot_reach_the_terminal():
    assert clean("\x1b[31m\x07") == "␛[31m␇"
    assert clean("a\u202eb\u200d") == "ab"


def test_needs_ascii():
    assert not needs_ascii("utf-8")
    assert not needs_ascii("gb18030")
    assert needs_ascii("ascii")
    assert needs_ascii("latin-1")
    assert needs_ascii(None)
    assert needs_ascii("no-such-encoding")


@given(any_text, st.integers(2, 40), st.integers(2, 60))
def test_wrapped_lines_fit_and_lose_nothing_but_spaces(text, width, first):
    lines = wrap(text, width, first)
    assert cell_len(lines[0]) <= first
    assert all(cell_len(line) <= width for line in lines[1:])
    assert "".join("".join(lines).split()) == "".join(clean(text).split())


@given(any_text, st.integers(0, 80), st.integers(0, 80))
def test_a_cut_is_as_wide_as_asked(text, start, length):
    line = display(text)
    cut = line.cut(start, start + length)
    assert width_of(cut) == max(0, min(line.width, start + length) - start)
