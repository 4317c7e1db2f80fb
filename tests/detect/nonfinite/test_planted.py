"""Random programs with one singular line: its line and its round are named, or nothing is; never another line."""

import warnings

from planted import planted

import gradsan
from forked import LIMIT, call_forked

PROGRAMS, MORE = 20, 600


def search(seeds, folder):
    """By seed what was found: (code, line, round), with the line and the round that were planted."""
    found = {}
    for seed in seeds:
        program = planted(seed)
        file = folder / f"program_{seed}.py"
        file.write_text(program.text, encoding="utf-8")
        with warnings.catch_warnings(), gradsan.watch("nonfinite") as watched:
            warnings.simplefilter("ignore")
            exec(compile(program.text, str(file), "exec"), {"__name__": "program"})
        told = [
            (one.code, label.frame.line, one.nonfinite.round)
            for one in watched.diagnoses
            for label in one.labels
            if label.role == "origin"
        ]
        found[seed] = told, program
    return found


def test_the_planted_line_is_named_or_none(tmp_path, request):
    is_long = request.config.getoption("--long")
    many = MORE if is_long else PROGRAMS
    found = call_forked(search, range(many), tmp_path, limit=900.0 if is_long else LIMIT)
    wrong = {
        seed: (told, program.line, program.round)
        for seed, (told, program) in found.items()
        if any((line, number) != (program.line, program.round) for _, line, number in told)
    }
    assert wrong == {}
    silent = [seed for seed, (told, _) in found.items() if not told]
    assert len(silent) <= many // 20, silent
