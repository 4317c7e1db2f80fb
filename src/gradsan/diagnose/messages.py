"""Codes of an error message: the traceback's text, whole or in part, and the codes that explain it."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import cache

from gradsan.catalogue import VERSION_CHECK, rows
from gradsan.diagnose.failures import explain
from gradsan.model import Failure, Frame, Site

_FREED = ("GS401", "GS402", "GS404", "GS403")
"""Most second backwards are due to a carried state or to two losses on one forward."""
REST_OF_FREED = (
    "or directly access saved tensors after they have already been freed. Saved intermediate values of the graph are "
    "freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the "
    "graph a second time or if you need to access saved tensors after calling backward"
)
"""The text after the pattern of that message."""
PARAMETER = ("GS110", "GS111", "GS112", "GS105")
RESULT = ("GS101", "GS103", "GS102", "GS104", "GS110")
_OUTPUT_OF = re.compile(r"which is output \d+ of (\w+?)(?:Backward\d*)?,")
_VIEWS_OF_PARAMETERS = frozenset({"T", "Transpose", "Permute", "AsStrided", "View", "Alias"})
_WORDS_IN_COMMON, _WORDS_IN_A_ROW = 4, 3
_NOT_WORDS = re.compile(r"\(\?P<\w+>[^)]*\)|\(\?(?:[!=]|<[!=])[^)]*\)|\(\?:|\\[a-zA-Z]|[\\\[\](){}.*+?^$|]")


def codes_of(text: str) -> tuple[str, ...]:
    """The codes that explain PyTorch's message in ``text``, the likeliest first; empty where none is known.

    ``text`` is a message in the words of any PyTorch version, a part of one, or a traceback that contains it.
    """
    flat = " ".join(text.split())
    if VERSION_CHECK in flat:
        return _of_version_check(flat)
    for row in rows():
        if any(pattern.search(one) for pattern in row.patterns for one in (text, flat)):
            return of_row(row.slug, row.raised_as)
    return _of_part(flat)


def _of_version_check(message: str) -> tuple[str, ...]:
    # A leaf is no output of an operation; a layer saves a view of its weight.
    output_of = _OUTPUT_OF.search(message)
    is_parameter = "is at version" in message and (output_of is None or output_of[1] in _VIEWS_OF_PARAMETERS)
    return PARAMETER if is_parameter else RESULT


def _of_part(text: str) -> tuple[str, ...]:
    """The codes of the messages that share most words with ``text``, in order: at least half of them, some in a row."""
    words = _words(text)
    least = max(min(_WORDS_IN_COMMON, len(words)), (len(words) + 1) // 2, _WORDS_IN_A_ROW)
    found: list[tuple[int, tuple[str, ...]]] = [
        (_in_common(words, _words(VERSION_CHECK)), RESULT),
        (_in_common(words, _words(REST_OF_FREED)), _FREED),
    ]
    for row in rows():
        for pattern in row.patterns:
            common = _in_common(words, _words(_NOT_WORDS.sub(" ", pattern.pattern)))
            if common >= least:
                found.append((common, of_row(row.slug, row.raised_as)))
    most = max(common for common, _ in found)
    return tuple(dict.fromkeys(code for common, codes in found if common == most >= least for code in codes))


def _words(text: str) -> list[str]:
    # Numbers differ from run to run.
    return re.findall(r"[a-z_]\w*", text.lower())


def _in_common(one: list[str], other: list[str]) -> int:
    sizes = [block.size for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()]
    return sum(sizes) if max(sizes) >= min(_WORDS_IN_A_ROW, len(one)) else 0


@cache
def of_row(slug: str, kind: str) -> tuple[str, ...]:
    """The codes of a row of the catalogue that is raised as ``kind``."""
    if slug == "freed_graph":
        return _FREED
    # Without clues every cause gives the diagnosis of its row.
    found = explain(Failure(slug, kind, "", Site((Frame("", 1, "<module>", is_user=True),))))
    return () if found is None else (found.code,)
