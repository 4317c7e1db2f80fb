"""Right programs under watching, and the codes reported for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import gradsan
from gradsan.record.recorder import recorder


def warnings_about(programs: Iterable[Callable[[], object]], mode: str) -> dict[str, list[str]]:
    """Run each program, seeded, in ``mode``; the codes of warnings and errors, for those that got any."""
    said = {}
    for program in programs:
        recorder().core.clear()
        torch.manual_seed(0)
        with gradsan.watch(mode) as watched:
            program()
        said[program.__name__] = [one.code for one in watched.diagnoses if one.severity != "note"]
    return {name: codes for name, codes in said.items() if codes}
