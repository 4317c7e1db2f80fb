"""For the whole suite: words are never missing, and no test leaves gradsan on for those that come after it."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["GRADSAN_TEXT"] = "strict"
os.environ["GRADSAN_DEBUG"] = "1"


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long tests, too")
    parser.addoption("--device", help="run tests/devices, on this kind of device")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    long = {one for one in items if one.get_closest_marker("long")}
    config.hook.pytest_deselected(items=[one for one in items if one in long])
    items[:] = [one for one in items if one not in long]


@pytest.fixture(autouse=True, scope="session")
def shared_folder(tmp_path_factory):
    """Names the folder that the workers of this run share to helpers that are no fixtures."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["PYTEST_SHARED_FOLDER"] = str(shared)


@pytest.fixture(autouse=True)
def nothing_left_on():
    """What a test switches on it switches off, and torch is as it was; a fixture of its module may have gradsan on."""
    was_on, were_wrapped = is_on(), wrappers()
    yield
    if not was_on and is_on():
        recorder = sys.modules["gradsan.record.recorder"]._recorder
        for stretch in list(recorder._stretches):
            recorder.stop(stretch)
        pytest.fail("gradsan was left on")
    assert were_wrapped or not wrappers(), "wrappers were left in torch"


def is_on() -> bool:
    capture = sys.modules.get("gradsan.record.recorder")
    return capture is not None and capture._recorder is not None and capture._recorder.is_on


def wrappers() -> list[object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [one for one in (torch.relu_, torch.exp, torch.Tensor.add_) if "gradsan" in type(one).__module__]
