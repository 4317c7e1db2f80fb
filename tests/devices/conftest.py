"""Tests on a device: ``pytest tests/devices --device NAME``, a name as ``cuda``, ``simulated`` or ``openreg``.

They run in a pytest of their own, as a simulated device becomes the accelerator of its process. Where the device is
not to be had, all of them are skipped, with one sentence that says why.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

_here = Path(__file__).parent
sys.path[:0] = [str(_here), str(_here.parent), str(_here.parents[1] / "tools")]

# Devices that are registered by the import of a module.
FROM_OUTSIDE = {"simulated": "simulated", "openreg": "torch_openreg"}


def pytest_ignore_collect(collection_path, config):
    return None if config.getoption("--device") else True


def pytest_collection_modifyitems(config, items):
    reason = why_missing(config.getoption("--device"))
    for one in items:
        if reason and _here in one.path.parents:
            one.add_marker(pytest.mark.skip(reason=reason))


def why_missing(name):
    """Why a device is not to be had here, and what the tests need of it; empty where it is."""
    if not name:
        return "no --device"
    if name == "openreg":
        import openreg

        if not openreg.is_built():
            return "torch_openreg is not built for this torch: python tools/openreg.py"
        sys.path.insert(0, str(openreg.installed()))
    if name in FROM_OUTSIDE:
        try:
            importlib.import_module(FROM_OUTSIDE[name])
        except ImportError as error:
            return str(error)
        return ""
    import torch

    module = getattr(torch, name, None)
    is_there = module is not None and module.is_available()
    return "" if is_there else f"torch {torch.__version__} has no {name} device here"


@pytest.fixture(scope="session")
def device(request):
    """The name of the first device."""
    return f"{request.config.getoption('--device')}:0"


@pytest.fixture(scope="session")
def second(request, device):
    """The name of the second one; the test is skipped where there is one only."""
    import torch

    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return device.replace(":0", ":1")
