"""Strictness: what is otherwise a note is a warning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gradsan.model import Diagnosis


def strictly(diagnoses: Iterable[Diagnosis]) -> tuple[Diagnosis, ...]:
    """The same findings, every note among them a warning."""
    return tuple(replace(one, severity="warning") if one.severity == "note" else one for one in diagnoses)
