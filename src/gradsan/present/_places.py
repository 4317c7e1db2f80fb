"""Paths and lines as shown to a reader in a given working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradsan import options
from gradsan.model import Diagnosis, Frame, Label, Site, package_path

_GRADSAN = Path(__file__).resolve().parent.parent


def working_directory(cwd: Path | None) -> Path | None:
    """Return ``cwd``, or the process's own; None if that has been deleted."""
    return options.working_directory() if cwd is None else cwd


def encodable(words: str) -> str:
    """Return ``words`` without lone surrogates (from undecodable file names), which UTF-8 cannot carry."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8")


def shown_path(file: str, cwd: Path | None) -> str:
    """Return ``file`` relative to ``cwd`` if it lies below it, with forward slashes; unchanged otherwise.

    A cell of the running notebook is ``In[2]``, as shown there, not its temporary file.
    """
    cell = _cell(file)
    if cell is not None:
        return cell
    if cwd is None or not Path(file).is_absolute():
        return file
    for path, base in ((Path(file), cwd), (Path(os.path.realpath(file)), Path(os.path.realpath(cwd)))):
        if path.is_relative_to(base):
            return path.relative_to(base).as_posix()
    return file


def _cell(file: str) -> str | None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    formatted = name_of(file) if name_of is not None else None
    return str(formatted[1]) if formatted else None


def location(frame: Frame, cwd: Path | None) -> str:
    """Return ``file:line:column``, without the column if it is unknown."""
    place = f"{shown_path(frame.file, cwd)}:{frame.line}"
    return place if frame.column is None else f"{place}:{frame.column}"


def is_gradsan(frame: Frame) -> bool:
    """Whether the frame is gradsan's own code, which no report shows."""
    return Path(frame.file).is_absolute() and Path(frame.file).is_relative_to(_GRADSAN)


def shown_stack(site: Site) -> tuple[Frame, ...]:
    """Return the frames of the user and of libraries, outermost first."""
    return tuple(frame for frame in site.frames if not is_gradsan(frame))


def library_place(site: Site) -> tuple[str, str] | None:
    """Return ``package/file.py:12`` and the function, where code of an installed package other than torch's was last.

    None where the user's own code called torch, or a builtin, itself.
    """
    frame = site.library_frame
    return None if frame is None else (f"{'/'.join(package_path(frame))}:{frame.line}", frame.function)


def primary_label(diagnosis: Diagnosis) -> Label | None:
    """Return the main label of a diagnosis: the use, else the last write, else the last label."""
    for role in ("used", "written", "origin"):
        found = [label for label in diagnosis.labels if label.role == role]
        if found:
            return found[-1]
    return diagnosis.labels[-1] if diagnosis.labels else None
