"""The smallest part of a program that still shows a disagreement."""

from __future__ import annotations

import judge
import statements as s


def shrunk(program: s.Program, kinds: frozenset[str], tries: int = 400) -> s.Program:
    """``program`` with every statement left out that is not needed for one of the ``kinds`` of complaint."""
    shortened = True
    while shortened:
        shortened = False
        for position in reversed(range(len(program))):
            if tries <= 0:
                return program
            tries -= 1
            truth = judge.accepted(program[:position] + program[position + 1 :])
            if truth is None or len(truth.program) >= len(program):
                continue
            if kinds & kinds_of(judge.complaints([truth])[0]):
                program, shortened = truth.program, True
                break
    return program


def kinds_of(complaints: list[str]) -> frozenset[str]:
    """What the complaints are about, without their numbers."""
    return frozenset(" ".join(complaint.split()[:5]) for complaint in complaints)
