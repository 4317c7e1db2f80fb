"""Terms of a session beyond watching: halting, healing of some findings only, a memory bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from gradsan.model import Conflict, Diagnosis, Evidence, Failure, Message

if TYPE_CHECKING:
    from gradsan.options import Options
    from gradsan.record.demands import Asked
    from gradsan.suppress import Rule

Mode = Literal["watch", "deep", "heal", "nonfinite"]


def is_wanted(diagnosis: Diagnosis) -> bool:
    """Whether no comment in the source suppresses a finding."""
    from gradsan.suppress import suppress

    return bool(suppress((diagnosis,)).kept)


@dataclass(frozen=True, slots=True)
class Terms:
    """Demands of a session beyond a report.

    ``halt`` stops the program at the first error found, ``early`` already at the write of a value that a live graph
    holds; ``strict`` turns notes into warnings, and stops at warnings, too. Findings for which ``wanted`` is False do
    not stop the program. Conflicts that match one of the rules ``only`` are healed (no rules: all), with at most
    ``max_bytes`` of originals.
    """

    halt: bool = False
    early: bool = False
    strict: bool = False
    only: tuple[Rule, ...] = ()
    max_bytes: int | None = None
    wanted: Callable[[Diagnosis], bool] = is_wanted

    def mode(self, mode: Mode) -> Mode:
        """Return the mode that these terms need, given the requested one."""
        if self.only:
            return "heal"
        return "deep" if self.early and mode == "watch" else mode

    def asked(self) -> Asked:
        """Return the demands for the recorder. Imports torch."""
        from gradsan.record.demands import Asked

        return Asked(
            stops=partial(_stops, self) if self.halt or self.early else None,
            early=self.early,
            heals=partial(_heals, self.only) if self.only else None,
            max_bytes=self.max_bytes,
        )


def chosen(options: Options, wanted: Callable[[Diagnosis], bool] = is_wanted) -> tuple[Mode, Terms]:
    """Return the mode and the terms that ``options`` request; ``wanted`` as in :class:`Terms`."""
    from gradsan.suppress import rules_of

    terms = Terms(
        halt=options.halt,
        early=options.early,
        strict=options.strict,
        only=rules_of(options.heal_only) if options.heal_only else (),
        max_bytes=options.max_bytes,
        wanted=wanted,
    )
    mode: Mode = "heal" if options.heal else "deep" if options.deep else "nonfinite" if options.nonfinite else "watch"
    return terms.mode(mode), terms


def _stops(terms: Terms, found: Conflict | Failure) -> Message | None:
    diagnosis = diagnosed(found)
    if diagnosis is None or not terms.wanted(diagnosis):
        return None
    # Under ``strict``, everything is at least a warning, and warnings stop.
    if diagnosis.severity != "error" and not terms.strict:
        return None
    return Message("error.halted", {"code": diagnosis.code, "title": diagnosis.title})


def _heals(rules: tuple[Rule, ...], conflict: Conflict) -> bool:
    diagnosis = diagnosed(conflict)
    if diagnosis is None:
        return False
    places = [(label.frame.file, label.frame.line) for label in diagnosis.labels]
    return any(
        rule.takes_code(diagnosis.code)
        and ((rule.path is None and rule.line is None) or any(rule.takes_place(*place) for place in places))
        for rule in rules
    )


def diagnosed(found: Conflict | Failure) -> Diagnosis | None:
    """Return the diagnosis of one finding; None for an error that gradsan cannot explain."""
    from gradsan.diagnose import diagnose

    if isinstance(found, Conflict):
        explained = diagnose(Evidence(conflicts=(found,)))
    else:
        explained = diagnose(Evidence(failures=(found,)))
    return explained[0] if explained else None
