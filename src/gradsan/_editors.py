"""Links that open a line of a file in an editor, and detection of the editor in use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from urllib.parse import quote

EDITORS: Mapping[str, str] = MappingProxyType(
    {
        "vscode": "vscode://file{file}:{line}:{column}",
        "vscodium": "vscodium://file{file}:{line}:{column}",
        "cursor": "cursor://file{file}:{line}:{column}",
        "windsurf": "windsurf://file{file}:{line}:{column}",
        "zed": "zed://file{file}:{line}:{column}",
        "pycharm": "pycharm://open?file={file}&line={line}",
        "emacs": "org-protocol://open-source?url=file://{file}&line={line}",
    }
)
"""The editors known by name, each with its URL for a line; ``{file}`` begins with a slash on Windows, too."""

CHOICES = ("auto", "none", *EDITORS)

_TEMPLATE = re.compile(r"(?!javascript|data|vbscript)[a-z][a-z0-9+.-]*:.*\{file\}", re.IGNORECASE | re.DOTALL)


def checked_editor(value: object) -> str:
    """Return ``value`` if it is one of :data:`CHOICES` or a URL with ``{file}``; raises ValueError otherwise."""
    if not isinstance(value, str) or not (value in CHOICES or _TEMPLATE.match(value)):
        raise ValueError(value)
    return value


def address_in(choice: str, environ: Mapping[str, str]) -> str | None:
    """Return the URL template for ``choice``; ``auto`` detects the editor of the terminal. None if there is none."""
    if choice == "auto":
        choice = _of_terminal(environ)
    return None if choice == "none" else EDITORS.get(choice, choice)


def link_to(address: str, file: PurePath, line: int, column: int | None) -> str:
    """Return the URL of a line (columns count from 1) in ``file``, which is absolute."""
    path = quote("/" + file.as_posix().lstrip("/"), safe="/:")
    return address.replace("{file}", path).replace("{line}", str(line)).replace("{column}", str(column or 1))


def _of_terminal(environ: Mapping[str, str]) -> str:
    if environ.get("ZED_TERM"):
        return "zed"
    if environ.get("TERM_PROGRAM") != "vscode":
        return "none"
    if environ.get("WSL_DISTRO_NAME"):
        return f"vscode://vscode-remote/wsl+{quote(environ['WSL_DISTRO_NAME'])}{{file}}:{{line}}:{{column}}"
    # The editor's machine may know this one by another name.
    if environ.get("SSH_CONNECTION"):
        return "none"
    return "cursor" if environ.get("CURSOR_TRACE_ID") else "vscode"
