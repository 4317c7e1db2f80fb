"""The pages describe what gradsan says: watched, each example gets the page's own code, and each right version none.

In ``gradsan run`` the first help shows its changed line, but for the codes of ``first_helps.WITHOUT_LINE``.

The same holds after a training that has gone on for long, when every bounded log has forgotten its beginning.
"""

import runpy
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from first_helps import WITHOUT_LINE
from test_pages import CODES as ALL_CODES
from test_pages import FAILING, OWN_PROCESS, RIGHT, SILENT, WARNED, blocks, sections

import gradsan
from forked import call_forked
from gradsan.record.recorder import recorder
from gradsan.repair.fixes import with_lines
from gradsan.text import page

CODES = [code for code in ALL_CODES if not code.startswith("GS7")]
"""What is read in the source alone, no run meets."""

WRITES, STEPS = 33_000, 600
LATER = """
import torch

w = torch.ones(3, requires_grad=True)
w.exp().sum().backward()
"""
"""A right program, watched after each failing one: nothing of the earlier stretch is reported again."""


def diagnosed(source, folder, mode="watch"):
    # A name of its own: what is known of a file's text is kept.
    program = folder / f"example_{len(list(folder.iterdir()))}.py"
    program.write_text(source, encoding="utf-8")
    failure = None
    watched = gradsan.watch(mode)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_, **__: None
            with watched:
                runpy.run_path(str(program))
    except (RuntimeError, ValueError) as error:
        failure = error
    finally:
        torch.set_warn_always(False)
    return watched.diagnoses, failure


def mode_of(code):
    """NaN and Inf are searched for on request."""
    return "nonfinite" if code.startswith("GS6") and code != "GS605" else "watch"


def fault_of_failing(code, source, folder):
    diagnoses, failure = diagnosed(source, folder, mode_of(code))
    if [diagnosis.code for diagnosis in diagnoses] != [code]:
        return f"diagnosed as {[diagnosis.code for diagnosis in diagnoses]}"
    (found,) = diagnoses
    expected = (page(code, "en").splitlines()[2], code in SILENT, code in SILENT | WARNED)
    came = (f"`{found.cause}`", found.silent, failure is None)
    if came != expected:
        return f"{came}, not {expected}"
    later = fault_of_right(code, LATER, folder)
    if later is not None:
        return f"the next stretch of watching: {later}"
    helps = with_lines(found).fixes
    has_line = bool(helps and helps[0].lines)
    return (
        None
        if has_line == (code not in WITHOUT_LINE)
        else f"the first help {'has a' if has_line else 'lacks its'} line"
    )


def fault_of_right(code, source, folder):
    diagnoses, failure = diagnosed(source, folder, mode_of(code))
    came = ([diagnosis.code for diagnosis in diagnoses], failure)
    return None if came == ([], None) else str(came)


def fault_after_long_run(code, source, folder):
    assert recorder().core.lost_writes_after(0)
    diagnoses, _ = diagnosed(source, folder, mode_of(code))
    came = ([found.code for found in diagnoses], [note.key for found in diagnoses for note in found.notes])
    return None if came[0] == [code] and "note.log_was_cut" not in came[1] else str(came)


def run_for_long():
    weight, other = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with gradsan.watch():
        for _ in range(STEPS):
            optimizer.zero_grad()
            (weight * other).sum().backward()
            optimizer.step()
        for _ in range(WRITES):
            other.add_(1)


CHECKS = {check.__name__: check for check in (fault_of_failing, fault_of_right, fault_after_long_run)}


def faults(check, examples):
    """What is wrong with examples, given as (code, source), by their codes."""
    found = {}
    recorder().core.clear()
    if check == "fault_after_long_run":
        run_for_long()
    with tempfile.TemporaryDirectory() as folder:
        for code, source in examples:
            if check != "fault_after_long_run":
                # Threads and storages get the numbers of earlier ones again: rare in one program, the rule here.
                recorder().core.clear()
            fault = CHECKS[check](code, source, Path(folder))
            if fault is not None:
                found[code] = fault
    recorder().core.clear()
    return found


def examples_of(check):
    for code in CODES:
        for source in blocks(sections(page(code, "en"))[RIGHT if check == "fault_of_right" else FAILING][1]):
            # Some right versions go wrong on purpose, to show that a check of one's own sees it.
            if check != "fault_of_right" or "except RuntimeError" not in source:
                yield code, source


@pytest.mark.parametrize("check", CHECKS)
def test_examples_get_the_code_of_their_page_and_right_versions_none(check, pytestconfig):
    examples = list(examples_of(check))
    assert {code for code, _ in examples} == set(CODES)
    if check == "fault_after_long_run" and not pytestconfig.getoption("--long"):
        # Full logs are looked through by each finding: a sample.
        examples = examples[::6]
    apart = [one for one in examples if OWN_PROCESS.search(one[1])]
    found = faults(check, [one for one in examples if one not in apart])
    # What is left of a process group, collected while the next example runs, has hung the process once.
    of_groups = [one for one in apart if "init_process_group" in one[1]]
    for some in ([one for one in apart if one not in of_groups], *([one] for one in of_groups)):
        found |= call_forked(faults, check, some)
    assert found == {}
