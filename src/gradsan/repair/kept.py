"""Cache of search results, kept as JSON for the next command until a file that they depend on changes.

It is in the user's cache folder, one file for each program with its arguments: nothing is left beside the program.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gradsan
from gradsan import model
from gradsan.repair.patch import Patch
from gradsan.repair.search import Found, Limits

_WEEK = 7 * 24 * 3600.0
_LARGEST_READ = 1 << 24
"""Bytes of a file up to which its content is hashed; of larger ones, size and modification time."""
_VOLATILE = frozenset(
    {
        *("_", "PWD", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM", "COLORTERM", "TERM_PROGRAM", "WINDOWID", "TTY"),
        *("SSH_TTY", "SSH_CLIENT", "SSH_CONNECTION", "SSH_AUTH_SOCK", "TMUX", "TMUX_PANE", "STY", "HISTCMD"),
        *("NO_COLOR", "FORCE_COLOR", "PYTEST_CURRENT_TEST"),
    }
)
_CLASSES: Mapping[str, type] = {
    **{name: one for name, one in vars(model).items() if isinstance(one, type) and dataclasses.is_dataclass(one)},
    **{one.__name__: one for one in (Found, Patch)},
}


def keep(found: Found, target: tuple[str, str, Any], limits: Limits, language: str) -> None:
    """Keep ``found`` for :func:`find_kept`; nothing where it cannot be written."""
    file = _file(target, limits, language)
    files = {*found.files, *(path for patch in found.patches for path in patch.files)}
    content = {"files": {path: _content_of(path) for path in files}, "found": _plain(found)}
    with contextlib.suppress(OSError, TypeError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_old(file.parent)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".new")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(content, stream)
        Path(name).replace(file)


def find_kept(target: tuple[str, str, Any], limits: Limits, language: str) -> Found | None:
    """The result of the last search for this program; None where there was none, or a file or a setting has changed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file = _file(target, limits, language)
        if file.stat().st_uid == os.getuid() and time.time() - file.stat().st_mtime < _WEEK:
            content = json.loads(file.read_text(encoding="utf-8"))
            if all(_content_of(path) == known for path, known in content["files"].items()):
                found = _made(content["found"])
                return found if isinstance(found, Found) else None
    return None


def _file(target: tuple[str, str, Any], limits: Limits, language: str) -> Path:
    kind, name, arguments = target
    circumstances = [
        *(kind, name, list(arguments), language, dataclasses.asdict(limits)),
        *(os.path.realpath(os.curdir), sys.executable, platform.python_version(), gradsan.__version__),
        *(_version_of("torch"), _age(), sorted(item for item in os.environ.items() if item[0] not in _VOLATILE)),
    ]
    digest = hashlib.sha256(json.dumps(circumstances).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(cache, "gradsan", "fixes", f"{digest[:32]}.json")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _age() -> float:
    """The last modification time of gradsan itself."""
    return max(file.stat().st_mtime for file in Path(gradsan.__file__).parent.rglob("*.py"))


def _content_of(path: str) -> str:
    try:
        found = Path(path).stat()
        if found.st_size > _LARGEST_READ:
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _forget_old(folder: Path) -> None:
    for file in folder.iterdir():
        if time.time() - file.stat().st_mtime > _WEEK:
            file.unlink(missing_ok=True)


def _plain(thing: Any) -> Any:
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = {one.name: _plain(getattr(thing, one.name)) for one in dataclasses.fields(thing)}
        return {"is": type(thing).__name__, "of": fields}
    if isinstance(thing, Mapping):
        return {"is": "mapping", "of": [[_plain(key), _plain(value)] for key, value in thing.items()]}
    if isinstance(thing, bytes):
        return {"is": "bytes", "of": base64.b64encode(thing).decode("ascii")}
    if isinstance(thing, frozenset | set):
        return {"is": "set", "of": _all_plain(sorted(thing))}
    if isinstance(thing, tuple | list):
        return _all_plain(thing)
    if thing is None or isinstance(thing, str | int | float):
        return thing
    raise TypeError(type(thing).__name__)


def _all_plain(things: Iterable[Any]) -> list[Any]:
    return [_plain(one) for one in things]


def _made(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(map(_made, plain))
    if not isinstance(plain, dict):
        return plain
    kind, content = plain["is"], plain["of"]
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "mapping":
        return {_made(key): _made(value) for key, value in content}
    if kind == "set":
        return frozenset(map(_made, content))
    return _CLASSES[kind](**{name: _made(value) for name, value in content.items()})
