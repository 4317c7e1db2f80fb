"""For the whole suite: words are never missing, and no test leaves gradsan on for those that come after it."""

from __future__ import annotations

import os
import sys

import pytest

os.environ["GRADSAN_TEXT"] = "strict"
os.environ["GRADSAN_DEBUG"] = "1"


@pytest.fixture(autouse=True)
def nothing_left_on():
    """What a test switches on it switches off, and torch is as it was."""
    yield
    torch, capture = sys.modules.get("torch"), sys.modules.get("gradsan.capture.recorder")
    recorder = capture._recorder if capture is not None else None
    if recorder is not None and recorder.is_on:
        while recorder.is_on:
            recorder.stop()
        pytest.fail("gradsan was left on")
    if torch is not None:
        left = [f for f in (torch.relu_, torch.exp, torch.Tensor.add_) if "gradsan" in type(f).__module__]
        assert not left, "wrappers were left in torch"
