"""Right programs in the style of users: the same printed numbers in every mode, no finding, nothing left behind."""

from __future__ import annotations

import contextlib
import io
import runpy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import gradsan
from forked import call_forked
from gradsan.record.recorder import recorder

PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


def printed(program: Path) -> str:
    torch.manual_seed(0)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(program), run_name="__main__")
    return out.getvalue()


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@contextmanager
def without_finding(mode: str) -> Iterator[None]:
    recorder().core.clear()
    with gradsan.watch(mode) as watched:  # type: ignore[arg-type]
        yield
    assert [one for one in watched.diagnoses if one.severity != "note"] == [], f"{mode}:\n{watched}"
    failed = [one for one in watched.report.seen.blind_spots if one.key == "blind.collect_failed"]
    assert failed == [], mode


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_right_program_prints_the_same_in_every_mode(program: Path, pytestconfig: pytest.Config) -> None:
    """In each mode with ``--long``; else in watch mode, and in one of the others in turn."""
    plain = printed(program)
    assert plain
    others = ("deep", "heal", "nonfinite")
    turn = PROGRAMS.index(program) % len(others)
    for mode in ("watch", *(others if pytestconfig.getoption("--long") else others[turn : turn + 1])):
        with without_finding(mode):
            assert printed(program) == plain, mode
    gradsan.enable()
    gradsan.disable()
    assert printed(program) == plain


def trained_in_threads_again_and_again() -> set[str]:
    program = next(one for one in PROGRAMS if one.stem == "threads")
    found = set()
    for _ in range(12):
        with without_finding("watch"):
            found.add(printed(program))
    return found


def test_gradients_of_another_thread_are_not_touched() -> None:
    """Its backward may be writing them: to read one then ends the process, now and then."""
    assert len(call_forked(trained_in_threads_again_and_again)) == 1
