"""Results by the content of files, kept from one run of ``gradsan lint`` to the next."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gradsan import __version__
from gradsan.lint._findings import Finding, as_record, of_record
from gradsan.lint.check import Checked

__all__ = ["Cache", "default_folder", "mark_of"]

_MOST = 200_000


def default_folder(environ: Mapping[str, str]) -> Path:
    """Where results are kept: ``gradsan`` in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME") or environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "gradsan"


def mark_of(data: bytes) -> str:
    """What stands for a file's content."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


class Cache:
    """Results of earlier runs of this version of the rules; the oldest are dropped where there are too many."""

    def __init__(self, folder: Path | None) -> None:
        """Read what ``folder`` holds; None keeps nothing."""
        self._file = None if folder is None else folder / f"lint-{_rules_mark()}.json"
        self._known: dict[str, list[dict[str, object]]] = {}
        self._has_changed = False
        if self._file is not None:
            try:
                self._known = json.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                self._known = {}

    def get(self, mark: str, lines: int) -> Checked | None:
        """The result for a content, None where it is not known."""
        records = self._known.get(mark)
        if records is None:
            return None
        try:
            return Checked(tuple(of_record(one) for one in records), lines) if records else Checked((), lines)
        except (KeyError, TypeError):
            return None

    def put(self, mark: str, findings: tuple[Finding, ...]) -> None:
        """Keep the result for a content."""
        self._known[mark] = [as_record(one) for one in findings]
        self._has_changed = True

    def close(self) -> None:
        """Write what is new; a folder that cannot be written is let be."""
        if self._file is None or not self._has_changed:
            return
        while len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as stream:
                json.dump(self._known, stream, separators=(",", ":"))
            os.replace(stream.name, self._file)  # noqa: PTH105
        except OSError:
            return


def _rules_mark() -> str:
    """What the results depend on beside the file: the rules, the tables, and the Python that parses."""
    here = Path(__file__).parent
    files = [*sorted(here.rglob("*.py")), *sorted(here.rglob("*.toml")), here.parent / "diagnose" / "needs.json"]
    state = [f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files if file.is_file()]
    return mark_of("\n".join([__version__, sys.version, *state]).encode())
