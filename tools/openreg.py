"""Build of ``torch_openreg``, PyTorch's own simulated accelerator, for the installed torch.

Usage::

    python tools/openreg.py                      # sources of the installed release, from PyTorch's repository
    python tools/openreg.py --source FOLDER      # a folder torch_openreg that lies here

What it is: an example of a device from outside PyTorch, in its tree under
``test/cpp_extensions/open_registration_extension/torch_openreg``. It has two devices whose memory the host may not
touch, streams, events, pinned memory and autocast; its kernels fall back to the CPU. ``make test-devices`` runs
``tests/devices`` on it. Nothing of it is part of this project: sources and build lie in the user's folder of caches,
one build for each release of torch, and are used again.

The last line printed is the folder that has to be on Python's path. The exit status is 2, with one sentence, where it
cannot be built: that takes git and the network (or ``--source``), cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

NAME = "torch_openreg"
_REPOSITORY = "https://github.com/pytorch/pytorch.git"
_IN_REPOSITORY = f"test/cpp_extensions/open_registration_extension/{NAME}"
_SECONDS_TO_FETCH = 120
_SECONDS_TO_BUILD = 900


class NotBuiltError(Exception):
    """The reason, as one sentence."""


def installed() -> Path:
    """The folder for the build that fits the installed torch, whether or not it is there."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return caches / "gradsan-tests" / f"openreg-{metadata.version('torch')}-python{python}"


def is_built() -> bool:
    """Whether :func:`installed` can be put on Python's path."""
    return (installed() / NAME / "_C.so").exists()


def fetch(repository: str, into: Path) -> Path:
    """The sources that belong to the installed torch, without the rest of its repository.

    Raises:
        NotBuiltError: there is no git, no such address, or no release of this name.
    """
    tag = "v" + metadata.version("torch").partition("+")[0]
    clone = ["clone", "--depth=1", "--filter=blob:none", "--sparse", "--branch", tag, repository, str(into)]
    _run(["git", *clone], f"the sources of {tag} could not be fetched from {repository}", _SECONDS_TO_FETCH)
    checkout = ["git", "-C", str(into), "sparse-checkout", "set", _IN_REPOSITORY]
    _run(checkout, f"{_IN_REPOSITORY} could not be fetched from {repository}", _SECONDS_TO_FETCH)
    return into / _IN_REPOSITORY


def build(source: Path, scratch: Path, target: Path) -> None:
    """Compile without the sources' own tests (they need GoogleTest), and put the package into ``target``.

    Raises:
        NotBuiltError: ``source`` is something else, a tool is missing, or compiling fails.
    """
    package = source / NAME
    if not (source / "CMakeLists.txt").is_file() or not package.is_dir():
        raise NotBuiltError(f"{source} is no folder with the sources of {NAME}")
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuiltError("torch is not installed for this Python")
    made, include = scratch / "made" / NAME, sysconfig.get_paths()["include"]
    shutil.copytree(package, made)
    configure = ["cmake", "-S", str(source), "-B", str(scratch / "build"), "-DUSE_TEST=OFF"]
    configure += [f"-DCMAKE_INSTALL_PREFIX={made}", f"-DPYTHON_INCLUDE_DIR={include}"]
    configure += [f"-DPYTORCH_INSTALL_DIR={Path(spec.origin).parent}"]
    if shutil.which("ninja"):
        configure += ["-G", "Ninja"]
    _run(configure, f"{NAME} could not be configured", _SECONDS_TO_BUILD)
    compile_all = ["cmake", "--build", str(scratch / "build"), "--target", "install", "--parallel"]
    _run([*compile_all, str(os.cpu_count() or 1)], f"{NAME} does not compile with this torch", _SECONDS_TO_BUILD)
    link = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-I{include}", str(made / "csrc" / "stub.c")]
    link += ["-o", str(made / "_C.so"), f"-L{made / 'lib'}", "-ltorch_bindings", "-Wl,-rpath,$ORIGIN/lib"]
    _run(link, f"the Python module of {NAME} could not be linked", _SECONDS_TO_BUILD)
    shutil.rmtree(target, ignore_errors=True)
    shutil.move(made.parent, target)


def _run(command: Sequence[str], failure: str, seconds: int) -> None:
    """Run a command quietly; where it fails, ``failure`` with the line that says why."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except FileNotFoundError as error:
        raise NotBuiltError(f"{failure}: there is no {command[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise NotBuiltError(f"{failure} within {seconds} s") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line.lower() or line.startswith("fatal")), "no reason given")
        raise NotBuiltError(f"{failure}: {said}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build where there is no build, and print its folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", type=Path, help="a folder with the sources, instead of fetching them")
    parser.add_argument("--repository", default=_REPOSITORY, help="the repository to fetch them from")
    parser.add_argument("--again", action="store_true", help="build also where there is a build for this torch")
    options = parser.parse_args(arguments)
    target, began = installed(), time.monotonic()
    try:
        if not is_built() or options.again:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                print(f"openreg: {'copying' if options.source else 'fetching'} the sources", file=sys.stderr)
                source = (options.source or fetch(options.repository, Path(folder, "pytorch"))).resolve()
                print("openreg: compiling (about a minute)", file=sys.stderr)
                build(source, Path(folder), target)
            print(f"openreg: built in {time.monotonic() - began:.0f} s", file=sys.stderr)
    except NotBuiltError as error:
        print(f"openreg: {error}", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
