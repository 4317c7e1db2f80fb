"""Terms of a session beyond watching: to halt, to heal some findings only, to bound memory."""

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
    """Whether no comment in the source says that a finding is not wanted."""
    from gradsan.suppress import suppress

    return bool(suppress((diagnosis,)).kept)


@dataclass(frozen=True, slots=True)
class Terms:
    """``halt`` stops the program at the first error found, ``early`` already where a value is overwritten that a live
    graph holds; ``strict`` makes warnings of notes, and stops at warnings, too. Of findings that ``wanted`` denies the
    program is not stopped. Healing is for conflicts that one of the rules ``only`` takes (none: for all), and what it
    keeps is bounded by ``max_bytes``.
    """

    halt: bool = False
    early: bool = False
    strict: bool = False
    only: tuple[Rule, ...] = ()
    max_bytes: int | None = None
    wanted: Callable[[Diagnosis], bool] = is_wanted

    def mode(self, mode: Mode) -> Mode:
        """The mode that these terms need where ``mode`` was asked for."""
        if self.only:
            return "heal"
        return "deep" if self.early and mode == "watch" else mode

    def asked(self) -> Asked:
        """The same, for capture. Importing it imports torch."""
        from gradsan.record.demands import Asked

        return Asked(
            stops=partial(_stops, self) if self.halt or self.early else None,
            early=self.early,
            heals=partial(_heals, self.only) if self.only else None,
            max_bytes=self.max_bytes,
        )


def chosen(options: Options, wanted: Callable[[Diagnosis], bool] = is_wanted) -> tuple[Mode, Terms]:
    """The mode and the terms that ``options`` ask for; ``wanted`` as in :class:`Terms`."""
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
    # Strictly, nothing is less than a warning, and warnings stop.
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
    """What one finding means; None for an error that nobody can explain."""
    from gradsan.diagnose import diagnose

    if isinstance(found, Conflict):
        explained = diagnose(Evidence(conflicts=(found,)))
    else:
        explained = diagnose(Evidence(failures=(found,)))
    return explained[0] if explained else None
