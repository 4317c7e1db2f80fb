"""The simulated accelerator of ``simulated.cpp`` as a device of PyTorch's, ``simulated:0`` and ``simulated:1``.

To import this registers it, as a vendor's package does. It is compiled when it is first used, into the user's folder of
caches, by the sources and the torch that it is made of; ``NotBuilt`` says why where that is impossible.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "simulated"
_SOURCE = Path(__file__).with_name("simulated.cpp")
_SECONDS_TO_BUILD = 600
_LARGEST = 1 << 34
_limit = 0


class NotBuilt(ImportError):
    """The simulated device cannot be compiled here."""


def library() -> Path:
    """The compiled device; it is compiled where it has not been.

    Raises:
        NotBuilt: there is no compiler, or it fails.
    """
    made_of = _SOURCE.read_bytes() + f"{torch.__version__} {sys.platform}".encode()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = caches / "gradsan-tests" / f"simulated-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or sys.platform != "linux":
        raise NotBuilt("the simulated device needs Linux and a C++ compiler")
    target.parent.mkdir(parents=True, exist_ok=True)
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        command = [compiler, "-std=c++20", "-O0", "-g0", "-fPIC", "-shared", str(_SOURCE), "-o", str(made)]
        command += ["-DAT_PER_OPERATOR_HEADERS", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
        command += [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_TO_BUILD, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotBuilt(f"the simulated device was not compiled in {_SECONDS_TO_BUILD} s") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise NotBuilt(f"the simulated device does not compile with torch {torch.__version__}: {lines[0]}")
        made.replace(target)
    return target


_path = library()
torch.ops.load_library(_path)
_c = ctypes.CDLL(str(_path))
_c.simulated_counts.restype = ctypes.c_char_p
_c.simulated_most_bytes.restype = _c.simulated_live_bytes.restype = ctypes.c_long


def counts() -> dict[str, int]:
    """What was asked of the device since :func:`forget`: kernels by name, copies, waits, allocations."""
    pairs = (line.split(" ", 1) for line in _c.simulated_counts().decode().splitlines())
    return {what: int(number) for number, what in pairs}


def forget() -> None:
    """Count anew, the most bytes, too."""
    _c.simulated_forget()


@contextlib.contextmanager
def restricted(*, to_known_kernels: bool = False, bytes: int = 0) -> Iterator[None]:
    """A block in which the device has no kernel but those counted so far, or no more than so many bytes (0: any)."""
    global _limit
    _c.simulated_restrict(to_known_kernels, ctypes.c_long(bytes))
    _limit = bytes
    try:
        yield
    finally:
        _c.simulated_restrict(False, ctypes.c_long(0))
        _limit = 0


def most_bytes() -> int:
    """The most bytes of both devices that were in use at one time, in whole pages."""
    return int(_c.simulated_most_bytes())


def live_bytes() -> int:
    """The bytes of both devices in use now, in whole pages."""
    return int(_c.simulated_live_bytes())


# What torch asks the module of a device for.


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return int(_c.simulated_device())


def set_device(device: Any) -> None:
    _c.simulated_set_device(torch.device(NAME, device).index if isinstance(device, int) else torch.device(device).index)


def synchronize(device: Any = None) -> None:
    _c.simulated_synchronize()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """What is free on the device, and what there is, in bytes."""
    total = _limit or _LARGEST
    return total - live_bytes(), total


def memory_reserved(device: Any = None) -> int:
    return live_bytes()


memory_allocated = memory_reserved


def manual_seed(seed: int) -> None:
    """Nothing: the kernels draw from the generator of the CPU."""


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> Any:
    return torch.get_rng_state()


def set_rng_state(state: Any, device: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[Any]:
    return [torch.float16, torch.bfloat16]


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    """``index`` as the current device."""
    before = current_device()
    set_device(index if isinstance(index, int) else torch.device(index).index)
    try:
        yield
    finally:
        set_device(before)


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
