"""Code outside the user's control, and candidates that cannot be run here."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import gradsan
from gradsan._imports import stored_in
from gradsan.model import Diagnosis, Fix, Frame, Message, Site
from gradsan.repair.patch import Patch, PatchError
from gradsan.source.tree import source_line

_PYTHON = ("stdlib", "platstdlib")
_PACKAGES = ("purelib", "platlib")
_OWN_FOLDER = os.path.join(str(Path(gradsan.__file__).parent), "")  # noqa: PTH118
_NEVER = frozenset({"torch", "functorch", "gradsan"})
"""Packages that are no part of a program: they do what the program requests."""


def is_library(file: str) -> bool:
    """Whether ``file`` belongs to an installed package or to Python itself."""
    real = os.path.realpath(file)
    return _below_packages(real) is not None or any(real.startswith(root + os.sep) for root in _roots(_PYTHON))


def imported_files() -> list[str]:
    """The files of all modules of this process."""
    files = [stored_in(module).get("__file__") for module in list(sys.modules.values())]
    return [one for one in files if isinstance(one, str)]


def own_files(files: Iterable[str | None]) -> tuple[str, ...]:
    """The paths of those ``files`` that are the user's own: of no installed package, not Python's and not gradsan's."""
    found = {_own_file(one) for one in files if one is not None and os.path.isabs(one)}  # noqa: PTH117
    return tuple(sorted(one for one in found if one is not None))


@functools.cache
def _own_file(file: str) -> str | None:
    # Most of some two thousand modules need no resolution of links.
    if _below_packages(file) is not None or file.startswith(_OWN_FOLDER):
        return None
    real = os.path.realpath(file)
    return None if is_library(real) or real.startswith(_OWN_FOLDER) else real


def taking_part(faults: Iterable[Diagnosis]) -> tuple[str, ...]:
    """The folders of the packages whose code does the faults' writes and saves, below the user's last frame."""
    frames = [frame for fault in faults for frame in _inner_frames(fault, ("saved", "written", "bridge"))]
    return tuple(dict.fromkeys(folder for frame in frames if (folder := _folder(frame.file)) is not None))


def advice(fault: Diagnosis) -> tuple[Fix, ...]:
    """Advice for a write in an installed package: its location, and remedies that leave the package unchanged."""
    for frame in _inner_frames(fault, ("written",)):
        folder = _folder(frame.file)
        if folder is not None:
            package = Path(folder).stem
            values = {
                "package": package,
                "version": _version(package),
                "function": frame.function,
                "file": frame.file,
                "line": frame.line,
            }
            return (Fix("change_library", "preserved", Message("fix.change_library", values)),)
    return ()


def _inner_frames(fault: Diagnosis, roles: tuple[str, ...]) -> Iterator[Frame]:
    """Frames of packages that were called by the user's code, the innermost first."""
    for label in fault.labels:
        if label.role in roles:
            yield from reversed(_below_user(label.site))


def _below_user(site: Site) -> tuple[Frame, ...]:
    last = max((index for index, frame in enumerate(site.frames) if frame.is_user), default=-1)
    return tuple(frame for frame in site.frames[last + 1 :] if _folder(frame.file) is not None)


def _folder(file: str) -> str | None:
    """The folder (or the one file) of the installed package that ``file`` is part of."""
    real = os.path.realpath(file)
    root = _below_packages(real)
    if root is None:
        return None
    name = Path(real).relative_to(root).parts[0]
    return None if Path(name).stem in _NEVER else str(Path(root, name))


def _below_packages(real: str) -> str | None:
    root = next((root for root in _roots(_PACKAGES) if real.startswith(root + os.sep)), None)
    if root is not None:
        return root
    for mark in ("site-packages", "dist-packages"):
        head, found, _ = real.rpartition(f"{os.sep}{mark}{os.sep}")
        if found:
            return f"{head}{os.sep}{mark}"
    return None


@functools.cache
def _roots(names: tuple[str, ...]) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.realpath(paths[name]) for name in names)


def _version(package: str) -> str:
    names = packages_distributions().get(package, [package])
    try:
        return version(names[0])
    except (PackageNotFoundError, ValueError):
        return "?"


def untried(fault: Diagnosis, most: int, cwd: Path | None) -> Diagnosis:
    """``fault`` with up to ``most`` fixes as diffs against the files on disk, all of them untested.

    Those that do not apply to the files are left as advice.
    """
    shown: list[Fix] = []
    advice: list[Fix] = []
    diffs: set[str] = set()
    for fix in fault.fixes:
        diff = _diff(fix, cwd)
        if not diff or len(shown) >= most:
            advice.append(replace(fix, lines=()))
        elif diff not in diffs:
            diffs.add(diff)
            how = fix.how_changed or Message("fix.not_run_how")
            shown.append(replace(fix, lines=(), diff=diff, meaning="changed", how_changed=how, applicability="review"))
    return replace(fault, fixes=(*shown, *advice))


def why_untried(faults: Sequence[Diagnosis]) -> Message:
    """The reason why no candidate was run for the last of ``faults``, and what the user can do."""
    fault = faults[-1]
    library = next((fix for fix in fault.fixes if fix.kind == "change_library"), None)
    if library is not None:
        return Message("fix.none_tried_library", library.summary.values)
    places = [label.frame for label in fault.labels if label.role in ("written", "saved")]
    if places and all(source_line(one.file, one.line) is None for one in places):
        return Message("fix.none_tried_no_source", {"file": places[0].file})
    return Message("fix.none_tried")


def _diff(fix: Fix, cwd: Path | None) -> str:
    try:
        return Patch().with_lines(fix.lines).diff(cwd) if fix.lines else ""
    except PatchError:
        return ""
