"""``# gradsan: ignore`` in a line of source, for all codes or for some."""

from __future__ import annotations

import io
import re
import tokenize
from functools import lru_cache

from gradsan.source.tree import source_line, source_lines
from gradsan.suppress._rules import Rule

_COMMENT = re.compile(r"#\s*gradsan:\s*ignore(?:\[(?P<codes>[^\]]*)\])?")
_CODE = re.compile(r"GS\d{3}|GS\dxx")


def comment_rules(file: str, line: int) -> tuple[Rule, ...]:
    """The rules that the comment in this line stands for; none where there is no such comment."""
    text = source_line(file, line)
    # Looking for the words first spares almost every file the tokenizing.
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
