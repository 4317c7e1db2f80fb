"""A diagnosis of a program with a patch laid over it, told by the lines of the files as they lie on disk."""

from __future__ import annotations

from dataclasses import replace

from gradsan.model import Diagnosis, Event, Frame, Label, Site
from gradsan.repair.patch import Patch


def on_disk(diagnosis: Diagnosis, patch: Patch) -> Diagnosis:
    """``diagnosis`` with every place moved to the line that it has without ``patch``."""
    if not patch.files:
        return diagnosis

    def moved(frame: Frame) -> Frame:
        if frame.file not in patch.files:
            return frame
        line, is_same = patch.line_before(frame.file, frame.line)
        if not is_same:
            return replace(frame, line=line, column=None, end_line=None, end_column=None)
        end = None if frame.end_line is None else patch.line_before(frame.file, frame.end_line)[0]
        return replace(frame, line=line, end_line=end)

    def label(one: Label) -> Label:
        return replace(one, frame=moved(one.frame), site=Site(tuple(map(moved, one.site.frames))))

    def event(one: Event) -> Event:
        return one if one.frame is None else replace(one, frame=moved(one.frame))

    labels, events = tuple(map(label, diagnosis.labels)), tuple(map(event, diagnosis.events))
    return replace(diagnosis, labels=labels, events=events)
