"""For the tests of fixes: processes of a search run in forks of one that has torch imported."""

from __future__ import annotations

import os
import sys

import pytest

from forked import warm_commands


@pytest.fixture(autouse=True)
def warm_searches(monkeypatch):
    """A search starts its server, or a process for each trial, by ``sys.executable``."""
    if hasattr(os, "pidfd_open"):
        monkeypatch.setattr(sys, "executable", str(warm_commands() / "python"))
