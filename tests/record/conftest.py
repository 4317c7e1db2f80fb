"""Both cores, as fixtures."""

import pytest

import core_kit
from gradsan.record import log


@pytest.fixture(params=core_kit.CORES)
def core(request):
    return log.make_core(request.param)


@pytest.fixture
def both():
    if not log.native_available():
        pytest.skip("the C core was not built for this Python")
    return log.make_core(False), log.make_core(True)


@pytest.fixture
def patched(core):
    with pytest.MonkeyPatch.context() as patch:
        core_kit.install(core, patch)
        yield core
        core.active = False
