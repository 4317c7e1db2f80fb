"""Findings held against the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradsan.model import Diagnosis
from gradsan.suppress._rules import Rule, comment_rules, fingerprint, rules_in


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left to report, how often each rule was used (``hits``), and the rules that were not (``unused``).

    ``known`` counts findings that a baseline has, ``gone`` the entries of the baseline that nothing was found for.
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
    """Take away the findings that a comment at one of their lines, a rule, or the baseline has.

    ``files`` are the sources of the program, in which comments may stand that nothing was found for.
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
