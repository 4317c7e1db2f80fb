"""Application of certain fixes (``--fix``): a file is left unchanged where the fault persists."""

from __future__ import annotations

from pathlib import Path

from gradsan.lint._findings import Finding, Suggestion
from gradsan.lint.check import check
from gradsan.source.change import Change, apply_change

_ROUNDS = 30


def mended(file: Path) -> int:
    """Write the certain changes of ``file``, one after another; return their number.

    Raises:
        OSError: where the file cannot be read or written.
        UnicodeDecodeError: where it is not UTF-8.
    """
    with file.open(encoding="utf-8", newline="") as stream:
        before = stream.read()
    if "\r" in before:
        return 0
    text, count = before, 0
    refused: set[tuple[str, int, str]] = set()
    for _ in range(_ROUNDS):
        findings = _certain(text, file)
        wanted = next((one for one in findings if _key(one) not in refused), None)
        if wanted is None or wanted.suggestion is None:
            break
        changed = _with(text, wanted.suggestion)
        if changed is None or len(_sure(changed, file)) >= len(_sure(text, file)):
            refused.add(_key(wanted))
            continue
        text, count = changed, count + 1
        _write(file, text)
    return count


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)


def _sure(text: str, file: Path) -> list[Finding]:
    return [one for one in check(text.encode(), str(file.absolute())).findings if one.is_sure]


def _certain(text: str, file: Path) -> list[Finding]:
    return [one for one in _sure(text, file) if one.suggestion is not None and one.suggestion.is_certain]


def _with(text: str, suggestion: Suggestion) -> str | None:
    try:
        return apply_change(text, Change(suggestion.line, suggestion.old, suggestion.new, suggestion.kind))
    except ValueError:
        return None


def _key(finding: Finding) -> tuple[str, int, str]:
    return finding.code, finding.at.line, finding.slug
