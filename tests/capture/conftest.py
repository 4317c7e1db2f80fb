"""Both cores, as fixtures."""

import core_kit
import pytest

from gradsan.record import _core


@pytest.fixture(params=core_kit.CORES)
def core(request):
    return _core.make_core(request.param)


@pytest.fixture
def both():
    if not _core.native_available():
        pytest.skip("the C core was not built for this Python")
    return _core.make_core(False), _core.make_core(True)


@pytest.fixture
def patched(core):
    with pytest.MonkeyPatch.context() as patch:
        core_kit.install(core, patch)
        yield core
        core.active = False
