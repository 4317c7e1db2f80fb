"""Suppression rules: a code and a location, from options, comments, files and a baseline; matching of findings."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from gradsan.model import Diagnosis
from gradsan.source.tree import source_line, source_lines

_RULE = re.compile(r"(?P<code>GS\d{3}|GS\dxx|\*)(?:\s*:\s*(?P<path>[^\s:][^:]*?)(?:\s*:\s*(?P<line>\d+))?)?\s*")


class RuleError(ValueError):
    """A rule that cannot be parsed."""

    def __init__(self, text: str, where: str) -> None:
        """Keep the text of the rule, and the file and line that it stands at; "" where there are none."""
        super().__init__(text)
        self.text = text
        self.where = where


@dataclass(frozen=True, slots=True)
class Rule:
    """Findings of ``code`` (``GS120``, ``GS2xx`` for a family, ``*``) with a label in ``path`` (a glob) at ``line``.

    ``path`` and ``line`` are None where any matches; ``origin`` says where the rule is written (``train.py:3``).
    """

    code: str
    path: str | None = None
    line: int | None = None
    origin: str = ""

    def takes_code(self, code: str) -> bool:
        """Whether the rule matches findings of ``code``."""
        return self.code in ("*", code) or (self.code.endswith("xx") and code.startswith(self.code[:3]))

    def takes_place(self, file: str, line: int) -> bool:
        """Whether the rule matches a label there; ``file`` is matched as a whole, below any folder, or by its name."""
        if self.line not in (None, line):
            return False
        if self.path is None:
            return True
        path = Path(file).as_posix()
        return fnmatchcase(path, self.path) or fnmatchcase(path, f"*/{self.path}")

    def __str__(self) -> str:
        """The rule in its written form."""
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
    """The rules of a suppression file: one per line, without empty lines and ``#`` comments.

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


_COMMENT = re.compile(r"#\s*gradsan:\s*ignore(?:\[(?P<codes>[^\]]*)\])?")
_CODE = re.compile(r"GS\d{3}|GS\dxx")


def comment_rules(file: str, line: int) -> tuple[Rule, ...]:
    """The rules of the suppression comment in this line; empty where there is no such comment."""
    text = source_line(file, line)
    # A search for the words first saves tokenizing almost every file.
    if text is None or "gradsan:" not in text:
        return ()
    return tuple(rule for rule in rules_in(file) if rule.line == line)


def rules_in(file: str) -> tuple[Rule, ...]:
    """The rules of every comment in a file."""
    return _rules(file, source_lines(file))


@lru_cache(maxsize=256)
def _rules(file: str, lines: tuple[str, ...]) -> tuple[Rule, ...]:
    if not any("gradsan:" in line for line in lines):
        return ()
    rules: list[Rule] = []
    text = "".join(f"{line}\n" for line in lines)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if found is not None:
                codes = ["*"] if found["codes"] is None else _CODE.findall(found["codes"])
                line = token.start[0]
                rules.extend(Rule(code, None, line, f"{file}:{line}") for code in codes)
    except (tokenize.TokenError, SyntaxError):
        return tuple(rules)
    return tuple(rules)


_SCHEMA = "gradsan.baseline/1"


def fingerprint(diagnosis: Diagnosis) -> str:
    """A hash of a finding that is stable under edits elsewhere: of its code, roles, file names, text of the lines."""
    parts = [diagnosis.code]
    for label in diagnosis.labels:
        frame = label.frame
        text = (source_line(frame.file, frame.line) or "").strip()
        parts.append(f"{label.role} {Path(frame.file).name} {frame.function} {text}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read_baseline(file: Path) -> dict[str, str]:
    """The fingerprints of a baseline file, each with its code.

    Raises:
        OSError: where the file cannot be read.
        ValueError: where it is no baseline.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("schema") != _SCHEMA:
        raise ValueError(str(file))
    return {str(known["fingerprint"]): str(known["code"]) for known in content["known"]}


def write_baseline(file: Path, diagnoses: Iterable[Diagnosis]) -> None:
    """Write the findings as known from now on. Raises OSError where that cannot be done."""
    known = {fingerprint(diagnosis): diagnosis.code for diagnosis in diagnoses}
    rows = [{"code": code, "fingerprint": mark} for mark, code in sorted(known.items())]
    file.write_text(json.dumps({"schema": _SCHEMA, "known": rows}, indent=1) + "\n", encoding="utf-8")


def rules_of(scope: str | Iterable[str]) -> tuple[Rule, ...]:
    """The rules that ``scope`` names: ``GS101``, ``GS2xx``, ``train.py``, ``train.py:12``, ``GS101:train.py:12``.

    A string names several with commas between them.

    Raises:
        ValueError: for a part that names neither a code nor a place, and where there is none at all.
    """
    words = scope.split(",") if isinstance(scope, str) else list(scope)
    rules = tuple(_rule_of(word.strip()) for word in words if word.strip())
    if not rules:
        raise ValueError(scope)
    return rules


def _rule_of(text: str) -> Rule:
    # A part that begins like a code is meant as one.
    return parse_rule(text if text.startswith(("GS", "*")) else f"*:{text}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The findings left to report, the number of uses of each rule (``hits``), and the unused rules (``unused``).

    ``known`` counts findings that a baseline has, ``gone`` the entries of the baseline without a finding.
    """

    kept: tuple[Diagnosis, ...]
    hits: Mapping[Rule, int]
    unused: tuple[Rule, ...]
    known: int = 0
    gone: int = 0


def suppress(
    diagnoses: Sequence[Diagnosis],
    rules: Iterable[Rule] = (),
    baseline: Mapping[str, str] | None = None,
    files: Iterable[str] = (),
) -> Outcome:
    """Remove the findings that match a comment at one of their lines, a rule, or the baseline.

    ``files`` are the sources of the program, whose comments may be unused.
    """
    given = tuple(dict.fromkeys(rules))
    hits: Counter[Rule] = Counter()
    seen: set[str] = set()
    kept: list[Diagnosis] = []
    for diagnosis in diagnoses:
        rule = _rule_for(diagnosis, given)
        if rule is not None:
            hits[rule] += diagnosis.count
            continue
        mark = fingerprint(diagnosis) if baseline else ""
        if baseline and mark in baseline:
            seen.add(mark)
            continue
        kept.append(diagnosis)
    in_comments = [rule for file in dict.fromkeys(files) for rule in rules_in(file)]
    unused = tuple(rule for rule in (*given, *dict.fromkeys(in_comments)) if not hits[rule])
    return Outcome(tuple(kept), dict(hits), unused, len(seen), len(baseline or ()) - len(seen))


def _rule_for(diagnosis: Diagnosis, rules: Sequence[Rule]) -> Rule | None:
    places = [(label.frame.file, label.frame.line) for label in diagnosis.labels]
    for file, line in places:
        for rule in comment_rules(file, line):
            if rule.takes_code(diagnosis.code):
                return rule
    for rule in rules:
        if rule.takes_code(diagnosis.code) and (
            (rule.path is None and rule.line is None) or any(rule.takes_place(*place) for place in places)
        ):
            return rule
    return None
