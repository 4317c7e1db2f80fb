"""A rule says which findings are not wanted: a code, and where. Written in options and in suppression files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

_RULE = re.compile(r"(?P<code>GS\d{3}|GS\dxx|\*)(?:\s*:\s*(?P<path>[^\s:][^:]*?)(?:\s*:\s*(?P<line>\d+))?)?\s*")


class RuleError(ValueError):
    """A rule that cannot be understood; ``text`` is what was written, ``where`` the file and line, if any."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.where = where


@dataclass(frozen=True, slots=True)
class Rule:
    """Findings of ``code`` (``GS120``, ``GS2xx`` for a family, ``*``) with a label in ``path`` (a glob) at ``line``.

    ``path`` and ``line`` are None where any will do; ``origin`` says where the rule stands (``train.py:3``).
    """

    code: str
    path: str | None = None
    line: int | None = None
    origin: str = ""

    def takes_code(self, code: str) -> bool:
        """Whether findings of ``code`` are meant."""
        return self.code in ("*", code) or (self.code.endswith("xx") and code.startswith(self.code[:3]))

    def takes_place(self, file: str, line: int) -> bool:
        """Whether a label there is meant; ``file`` is matched as a whole, below any folder, or by its name."""
        if self.line not in (None, line):
            return False
        if self.path is None:
            return True
        path = Path(file).as_posix()
        return fnmatchcase(path, self.path) or fnmatchcase(path, f"*/{self.path}")

    def __str__(self) -> str:
        """As it is written."""
        return ":".join(str(part) for part in (self.code, self.path, self.line) if part is not None)


def parse_rule(text: str, origin: str = "") -> Rule:
    """A rule from ``CODE``, ``CODE:path`` or ``CODE:path:line``; ``*`` is any code, ``GS2xx`` a family.

    Raises:
        RuleError: for anything else.
    """
    found = _RULE.fullmatch(text.strip())
    if found is None:
        raise RuleError(text, origin)
    line = found["line"]
    return Rule(found["code"], found["path"], None if line is None else int(line), origin)


def read_rules(file: Path) -> tuple[Rule, ...]:
    """The rules of a suppression file: one a line, empty lines and what follows ``#`` aside.

    Raises:
        RuleError: for a line that is no rule.
        OSError: where the file cannot be read.
        UnicodeDecodeError: where it is not UTF-8.
    """
    rules = []
    for number, row in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = row.partition("#")[0].strip()
        if text:
            rules.append(parse_rule(text, f"{file.name}:{number}"))
    return tuple(rules)
