"""Small training programs in the style of users, with right and harmful versions of them made by hand.

A case (``users/NAME.toml``) holds a program that fails, or trains wrongly in silence, and edits that make it right or
harmful. What a version comes to is what it prints last: the sums of its trained parameters. The program is watched in a
process of its own, forked from one that has imported torch; the versions of one case, which gradsan does not watch,
share another: a fork takes longer than such a program.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forked import call_forked

_TOML = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
FOLDER = Path(__file__).parent / "users"
NAMES = sorted(file.stem for file in FOLDER.glob("*.toml"))

Lines = tuple[tuple[str, int, str], ...]
Outcome = tuple[float, ...] | str
"""The numbers of the lines that begin with ``final``, or the name of the exception that ended it."""


@dataclass(frozen=True)
class Case:
    """``right`` and ``harmful`` are the texts of whole programs; ``first_is_right`` asks it of the first help.

    With ``is_for_words`` no candidate can be proved right, and none at all may be harmful.
    """

    name: str
    broken: str
    right: tuple[str, ...]
    harmful: tuple[str, ...]
    first_is_right: bool = False
    is_for_words: bool = False


def case(name: str) -> Case:
    """The case of this name."""
    told = _TOML.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    program = told["program"]

    def versions(kind: str) -> tuple[str, ...]:
        return tuple(_edited(program, one["edits"]) for one in told.get(kind, ()))

    asked = (told.get("first_is_right", False), told.get("is_for_words", False))
    return Case(name, program, versions("right"), versions("harmful"), *asked)


def _edited(text: str, edits: list[list[str]]) -> str:
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the program"
        text = text.replace(old, new)
    return text


def outcomes(texts: Sequence[str], file: Path) -> dict[str, Outcome]:
    """What each of the programs comes to, run without gradsan; ``file`` is what it takes for its own."""
    return dict(zip(texts, call_forked(_plain, tuple(texts), str(file)), strict=True)) if texts else {}


@dataclass(frozen=True)
class Found:
    """A diagnosis: its code, the lines of each fix that it shows (empty for advice), and those that would be tried."""

    code: str
    shown: tuple[Lines, ...]
    tried: tuple[Lines, ...]


def watched(text: str, file: Path) -> list[Found]:
    """What gradsan says of the program."""
    file.write_text(text, encoding="utf-8")
    return call_forked(_watch, text, str(file))


def is_one_of(one: Outcome, others: Iterable[Outcome]) -> bool:
    """Whether the outcome is one of the others, within the rounding of float32 over a few steps."""
    return any(_is_same(one, other) for other in others)


def _is_same(one: Outcome, other: Outcome) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return False
    return len(one) == len(other) and all(abs(a - b) <= 2e-6 * (1 + abs(b)) for a, b in zip(one, other, strict=True))


def _perform(text: str, file: str) -> tuple[str, BaseException | None]:
    import torch

    os.chdir(Path(file).parent)
    torch.set_num_threads(1)
    printed, raised = io.StringIO(), None
    module = {"__name__": "__main__", "__file__": file}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()), torch.enable_grad():
        try:
            exec(compile(text, file, "exec", dont_inherit=True), module)
        except Exception as error:
            raised = error
    return printed.getvalue(), raised


def _plain(texts: Sequence[str], file: str) -> list[Outcome]:
    return [_outcome(*_perform(text, file)) for text in texts]


def _outcome(printed: str, raised: BaseException | None) -> Outcome:
    if raised is not None:
        return f"{type(raised).__name__}: {raised}".splitlines()[0]
    finals = [line for line in printed.splitlines() if line.startswith("final")]
    return tuple(float(number) for line in finals for number in re.findall(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?", line))


def _watch(text: str, file: str) -> list[Found]:
    from gradsan._session import Session
    from gradsan.repair.fixes import with_candidates, with_lines

    session = Session()
    session.start()
    _, raised = _perform(text, file)
    if raised is not None:
        session.examine(raised)
    session.stop()
    return [
        Found(
            one.code,
            tuple(fix.lines for fix in with_lines(one).fixes),
            tuple(fix.lines for fix in with_candidates(one).fixes if fix.lines),
        )
        for one in session.report().diagnoses
    ]
