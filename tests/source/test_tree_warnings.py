"""Warnings of the program's while gradsan reads its sources."""

import warnings

from gradsan.source.tree import parses

ESCAPED = 'PATTERN = "\\d"\n'


def test_a_line_that_has_warned_does_not_warn_again():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("of the program", stacklevel=1)
            assert parses(ESCAPED)
    assert [str(one.message) for one in shown] == ["of the program"]


def test_a_source_that_would_warn_is_read_where_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parses(ESCAPED)
