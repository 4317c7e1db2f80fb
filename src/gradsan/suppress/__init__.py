"""Suppression of findings: comments in the source, options, suppression files, baselines."""

from gradsan.suppress._rules import (
    Outcome,
    Rule,
    RuleError,
    parse_rule,
    read_baseline,
    read_rules,
    rules_of,
    suppress,
    write_baseline,
)

__all__ = [
    "Outcome",
    "Rule",
    "RuleError",
    "parse_rule",
    "read_baseline",
    "read_rules",
    "rules_of",
    "suppress",
    "write_baseline",
]
