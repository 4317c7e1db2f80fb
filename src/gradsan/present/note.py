"""Diagnosis in a few plain lines, for the notes of an exception."""

from __future__ import annotations

from collections.abc import Sequence

from gradsan import text
from gradsan.model import Diagnosis, Message
from gradsan.present._canvas import word
from gradsan.present._cells import clean
from gradsan.present._places import shown_path, working_directory
from gradsan.source.tree import source_line


def short_note(diagnosis: Diagnosis, language: str) -> str:
    """Return two to five lines without colour: the title, where it was saved, overwritten and needed, the first help.

    Files are shown relative to the working directory. Of several places of one kind the first is shown, with the
    number of the others.
    """
    colon = word(language, "colon")
    severity = word(language, f"severity.{diagnosis.severity}")
    lines = [f"gradsan{colon}{severity}[{diagnosis.code}]{colon}{_say(diagnosis.title, language)}"]
    for role in ("saved", "written", "used", "origin", "noticed"):
        places = _places(diagnosis, role)
        if places:
            shown = places[0]
            if len(places) > 1:
                shown = word(language, "and_others", place=shown, count=len(places) - 1)
            lines.append(f"  {word(language, f'role.{role}')}{colon}{shown}")
    if diagnosis.fixes:
        lines.append(f"  {word(language, 'help')}{colon}{_say(diagnosis.fixes[0].summary, language)}")
    if len(lines) == 1:
        lines.append(f"  {_say(diagnosis.explanation, language)}")
    return "\n".join(lines)


def unseen_note(blind_spots: Sequence[Message], language: str) -> str:
    """Return that an error was not explained, and a line for each thing that gradsan could not see."""
    lines = [f"gradsan{word(language, 'colon')}{word(language, 'unexplained')}"]
    return "\n".join([*lines, *(f"  - {_say(spot, language)}" for spot in blind_spots)])


def _say(message: Message, language: str) -> str:
    return clean(text.say(message, language))


def _places(diagnosis: Diagnosis, role: str) -> list[str]:
    cwd = working_directory(None)
    places: list[str] = []
    for label in diagnosis.labels:
        if label.role == role:
            place = f"{shown_path(label.frame.file, cwd)}:{label.frame.line}"
            source = (source_line(label.frame.file, label.frame.line) or "").strip()
            places.append(clean(f"{place}  {source}") if source else place)
    return places
