"""For the whole suite: words are never missing, and no test leaves gradsan on for those that come after it."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["GRADSAN_TEXT"] = "strict"
os.environ["GRADSAN_DEBUG"] = "1"

LONG = (
    "capture/test_ways.py",
    "cli/test_fix_limits.py",
    "ranks/test_collective_writes.py",
    "ranks/test_data_parallel.py",
    "repair/test_replay.py",
    "silent/test_quiet_trainings.py",
    "test_examples_fixed.py",
)
"""Files that take minutes together; they and what is marked ``long`` run with ``--long`` (``make test-long``)."""


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long tests, too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    long = [one for one in items if one.get_closest_marker("long") or one.path.as_posix().endswith(LONG)]
    config.hook.pytest_deselected(items=long)
    items[:] = [one for one in items if one not in set(long)]


@pytest.fixture(autouse=True)
def nothing_left_on():
    """What a test switches on it switches off, and torch is as it was; a fixture of its module may have gradsan on."""
    was_on, were_wrapped = is_on(), wrappers()
    yield
    if not was_on and is_on():
        recorder = sys.modules["gradsan.capture.recorder"]._recorder
        while recorder.is_on:
            recorder.stop()
        pytest.fail("gradsan was left on")
    assert were_wrapped or not wrappers(), "wrappers were left in torch"


def is_on() -> bool:
    capture = sys.modules.get("gradsan.capture.recorder")
    return capture is not None and capture._recorder is not None and capture._recorder.is_on


def wrappers() -> list[object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [one for one in (torch.relu_, torch.exp, torch.Tensor.add_) if "gradsan" in type(one).__module__]
