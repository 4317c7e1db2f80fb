"""Each test of jobs starts one in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from job import Job, run_job

torch_distributed = pytest.importorskip("torch.distributed")
if not (torch_distributed.is_available() and torch_distributed.is_gloo_available()):
    collect_ignore_glob = ["test_*"]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Job]:
    """Run a program in two ranks under ``gradsan run``, started as users start it."""
    return lambda body, *options, **how: run_job(tmp_path, body, *options, **how)


@pytest.fixture
def run_warm(tmp_path: Path) -> Callable[..., Job]:
    """As ``run``, with torch imported already: where what is tested is not how ranks are started and ended."""
    return lambda body, *options, **how: run_job(tmp_path, body, *options, **how, is_warm=True)
