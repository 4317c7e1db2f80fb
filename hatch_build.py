"""Build hooks: the optional native core, for wheels and editable installs, and the project's addresses of a release.

gradsan is complete without it. Where no C compiler is found, or the file does not compile, the build goes on in pure
Python and says so in one line. ``GRADSAN_BUILD_NATIVE=0`` leaves the native core out; ``GRADSAN_BUILD_NATIVE=1`` turns
a failure to build it into an error.

Where the project lives is known to who releases it: ``GRADSAN_PROJECT_URL`` (the repository) and ``GRADSAN_SITE_URL``
(the documentation) become ``[project.urls]``. Where they are not set, the metadata name no address.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "src/gradsan/record"
IN_WHEEL = "gradsan/record"
MODULE = "_native"
SWITCH = "GRADSAN_BUILD_NATIVE"
REPOSITORY, SITE = "GRADSAN_PROJECT_URL", "GRADSAN_SITE_URL"


def addresses(repository: str, site: str) -> dict[str, str]:
    """``[project.urls]`` of a ``repository`` on GitHub and of the documentation at ``site``; of "" nothing is named."""
    named = {"Documentation": site}
    if repository:
        base = repository.rstrip("/")
        named |= {"Repository": base, "Issues": f"{base}/issues", "Changelog": f"{base}/blob/main/CHANGELOG.md"}
    return {name: address for name, address in named.items() if address}


class AddressHook(MetadataHookInterface):
    """Adds ``[project.urls]`` from the environment of the build."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``urls`` where an address is known. Raises :class:`ValueError` for one that is no http(s) address."""
        found = {name: os.environ.get(name, "") for name in (REPOSITORY, SITE)}
        for name, address in found.items():
            if address and not address.startswith(("https://", "http://")):
                raise ValueError(f"{name} is {address!r}; it takes an address that begins with https://")
        if urls := addresses(found[REPOSITORY], found[SITE]):
            metadata["urls"] = urls


class NativeCoreHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds ``gradsan.record._native`` to a wheel, or puts it beside the sources for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile where it is wanted and possible; ``version`` is ``editable`` or ``standard``.

        Raises whatever the compiler step raised when ``GRADSAN_BUILD_NATIVE=1``.
        """
        source = Path(self.root, PACKAGE, f"{MODULE}.c")
        if self.target_name != "wheel" or not source.is_file():
            return
        switch = os.environ.get(SWITCH, "")
        if switch not in ("", "0", "1"):
            raise ValueError(f"{SWITCH} is {switch!r}; it can be 0 (leave out), 1 (require) or unset (where possible)")

        beside_sources = Path(self.root, PACKAGE, library_name())
        if version == "editable":
            # A library of an earlier build would go on being imported, whatever this build decides.
            beside_sources.unlink(missing_ok=True)
        if switch == "0":
            self.app.display_info(f"gradsan: {SWITCH}=0, pure Python capture")
            return
        self._work = tempfile.TemporaryDirectory(prefix="gradsan-native-")
        try:
            library = compile_extension(source, Path(self._work.name))
        except Exception as error:
            if switch == "1":
                raise
            self.app.display_warning(f"gradsan: no native core ({one_line(error)}); pure Python capture")
            return

        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version == "editable":
            move_into_place(library, beside_sources)
        else:
            build_data["force_include"][str(library)] = f"{IN_WHEEL}/{library.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiler's working directory once the wheel is written."""
        if hasattr(self, "_work"):
            self._work.cleanup()


def library_name() -> str:
    """File name under which this Python imports the module: ``_native.cpython-311-x86_64-linux-gnu.so``."""
    return MODULE + str(sysconfig.get_config_var("EXT_SUFFIX"))


def compile_extension(source: Path, work: Path) -> Path:
    """Compile ``source`` and the other C files beside it in ``work``, and give the library's path.

    setuptools knows each platform's compiler and flags, and honours ``CC`` and ``CFLAGS``. Raises ImportError without
    setuptools, and setuptools' own errors where there is no compiler, no ``Python.h``, or the code does not compile.
    """
    from setuptools import Distribution, Extension

    extension = Extension(MODULE, sorted(file.name for file in source.parent.glob("*.c")))
    command = Distribution({"name": MODULE, "ext_modules": [extension]}).get_command_obj("build_ext")
    command.build_lib = str(work)
    command.build_temp = str(work / "objects")
    before = Path.cwd()
    # A path relative to its own directory keeps the object file below build_temp and this machine's paths out of it.
    os.chdir(source.parent)
    try:
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    return work / library_name()


def move_into_place(library: Path, target: Path) -> None:
    """Put the library at ``target`` in one go, so that a running Python never maps a half-written file."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{MODULE}-", suffix=".tmp", delete=False) as partial:
        partial.write(library.read_bytes())
    Path(partial.name).chmod(0o755)
    Path(partial.name).replace(target)


def one_line(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
