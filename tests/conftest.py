"""For the whole suite: words are never missing, and no test leaves gradsan on for those that come after it."""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

import forked

os.environ["GRADSAN_TEXT"] = "strict"
os.environ["GRADSAN_DEBUG"] = "1"
# Programs of tests are small: workers and their children would wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each worker rewrites the asserts of all test files; with PYTHONDONTWRITEBYTECODE it would in each run anew.
sys.dont_write_bytecode = False
# Else every process that compiles starts another one, which imports torch; headers pay for many kernels, not for few.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long tests, too")
    parser.addoption("--device", help="run tests/devices, on this kind of device")


def pytest_configure(config):
    """Choose how many examples hypothesis takes, and have the bytecode of gradsan lie there for processes of tests.

    With PYTHONDONTWRITEBYTECODE each of them would compile all that it imports.
    """
    hypothesis.settings.register_profile("short", max_examples=15)
    hypothesis.settings.register_profile("long", max_examples=100)
    hypothesis.settings.load_profile("long" if config.getoption("--long") else "short")
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).resolve().parents[1] / "src", quiet=2)
        if config.getoption("numprocesses", None) and hasattr(os, "fork"):
            os.environ[forked.SHARED_SERVER] = forked.start_server()


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    long = {one for one in items if one.get_closest_marker("long")}
    config.hook.pytest_deselected(items=[one for one in items if one in long])
    items[:] = [one for one in items if one not in long]


@pytest.fixture(autouse=True, scope="session")
def shared_folder(tmp_path_factory):
    """Names the folder that the workers of this run share to helpers that are no fixtures; temporary files lie in it.

    What programs of other runs have left in the system's folder for temporary files is not found by a test.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["PYTEST_SHARED_FOLDER"] = str(shared)
    temporary = shared / "temporary"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None


@pytest.fixture(autouse=True, scope="session")
def imported():
    """Imports what the first optimizer of a program imports: hundreds of thousands of objects, which freezing hides."""
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def small_heap(imported):
    """Keeps what earlier modules left out of collections and of ``gc.get_objects``: a suite's heap is a large one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def usual_core():
    """Has each module begin with the core that a program gets, whichever an earlier one has chosen."""
    recorder = sys.modules.get("gradsan.record.recorder")
    if recorder is not None and recorder._recorder is not None and not recorder._recorder.is_on:
        recorder.recorder(sys.modules["gradsan.record.log"].native_available())


@pytest.fixture(autouse=True)
def nothing_left_on():
    """What a test switches on it switches off, and torch is as it was; a fixture of its module may have gradsan on.

    A test begins with empty logs, as a program does: a full one is looked through by every finding.
    """
    was_on, were_wrapped = is_on(), wrappers()
    recorder = sys.modules.get("gradsan.record.recorder")
    if not was_on and recorder is not None and recorder._recorder is not None:
        recorder._recorder.core.clear()
    yield
    if not was_on and is_on():
        recorder = sys.modules["gradsan.record.recorder"]._recorder
        for stretch in list(recorder._stretches):
            recorder.stop(stretch)
        pytest.fail("gradsan was left on")
    assert were_wrapped or not wrappers(), "wrappers were left in torch"


@pytest.fixture(scope="module")
def chromium():
    """A browser without a window; skips where there is none. While it is there, no other event loop can run."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    found = os.environ.get("GRADSAN_CHROMIUM") or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    with sync_api.sync_playwright() as playwright:
        path = found or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip(
                "no Chromium: put one on the path, name it in GRADSAN_CHROMIUM, or `playwright install chromium`"
            )
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def is_on() -> bool:
    capture = sys.modules.get("gradsan.record.recorder")
    return capture is not None and capture._recorder is not None and capture._recorder.is_on


def wrappers() -> list[object]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    return [one for one in (torch.relu_, torch.exp, torch.Tensor.add_) if "gradsan" in type(one).__module__]
