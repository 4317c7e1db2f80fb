"""Programs run in children: patched texts, limits, and what comes back."""

import textwrap

import pytest

from gradsan.repair import Limits, find_fixes
from gradsan.repair.patch import Patch
from gradsan.repair.trials.trial import Request, run_trial

PROGRAM = """
import torch
from helper import scale

torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = scale(net(torch.ones(3, 2)).exp()).sum()
    loss.backward()
    optimizer.step()
"""
BROKEN = "def scale(value):\n    value *= 2\n    return value\n"


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "main.py").write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "helper.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trial(patch=None, steps=0, timeout=120, mode="watch"):
    return run_trial(Request(("script", "main.py", ()), mode, (patch or Patch()).files, steps, timeout))


def test_a_failing_program_comes_back_with_its_fixes(program):
    done = trial()
    assert done.status == 1
    assert not done.recording.finished
    assert done.recording.exception[0] == "RuntimeError"
    [diagnosis] = done.diagnoses
    assert diagnosis.code == "GS101"
    assert any(fix.lines for fix in diagnosis.fixes)
    assert "RuntimeError" in done.output


def test_a_patch_lies_over_an_imported_file_and_the_disk_is_left_alone(program):
    helper = str(program / "helper.py")
    patch = Patch().with_lines(((helper, 2, "    value = value * 2"),))
    done = trial(patch)
    assert done.status == 0, done.output
    assert done.diagnoses == ()
    assert len(done.recording.steps) == 4
    assert (program / "helper.py").read_text() == BROKEN
    assert trial().status == 1


def test_a_patch_lies_over_the_script(program):
    main = str(program / "main.py")
    line = PROGRAM.split("\n").index("    loss = scale(net(torch.ones(3, 2)).exp()).sum()") + 1
    done = trial(Patch().with_lines(((main, line, "    loss = net(torch.ones(3, 2)).exp().sum()"),)))
    assert done.status == 0, done.output
    assert len(done.recording.losses) == 4


def test_a_patch_lies_over_a_script_that_the_program_runs(program):
    main = str(program / "main.py")
    line = PROGRAM.split("\n").index("    loss = scale(net(torch.ones(3, 2)).exp()).sum()") + 1
    patch = Patch().with_lines(((main, line, "    loss = net(torch.ones(3, 2)).exp().sum()"),))
    (program / "start.py").write_text('import runpy\nrunpy.run_path("main.py", run_name="__main__")\n')
    done = run_trial(Request(("script", "start.py", ()), "watch", patch.files, 0, 120))
    assert done.status == 0, done.output
    assert len(done.recording.losses) == 4


def test_healing_gives_the_gradients_of_the_program_as_written(program):
    helper = str(program / "helper.py")
    right = trial(Patch().with_lines(((helper, 2, "    value = value * 2"),)))
    healed = trial(mode="heal")
    assert healed.recording.finished, healed.output
    assert healed.recording.steps == right.recording.steps


def test_it_ends_after_the_steps_asked_for(program):
    helper = str(program / "helper.py")
    done = trial(Patch().with_lines(((helper, 2, "    value = value * 2"),)), steps=2)
    assert done.recording.finished
    assert len(done.recording.steps) == 2


def test_it_ends_where_the_reference_was_ended(program):
    helper = str(program / "helper.py")
    patch = Patch().with_lines(((helper, 2, "    value = value * 2"),))
    ends = run_trial(Request(("script", "main.py", ()), "watch", patch.files, 0, 120, until=(("step 1x2;1", 3),)))
    assert (ends.recording.was_ended, len(ends.recording.steps)) == (True, 3)


def test_reads_of_the_trial_itself_are_not_watched(program):
    (program / "main.py").write_text(PROGRAM.replace("from helper import scale", "scale = torch.clone"))
    done = trial()
    # Those by which the layer gets its first weights.
    assert done.seen.writes == 2


def test_it_is_stopped_when_time_is_up(program):
    (program / "main.py").write_text("import time\ntime.sleep(60)\n")
    done = trial(timeout=1)
    assert done.timed_out


@pytest.mark.parametrize(
    ("text", "status", "is_answered"),
    [
        ("import os, torch\nos._exit(3)\n", 3, False),
        ("import os\nos.kill(os.getpid(), 9)\n", -9, False),
        ("print(1)\n", 0, True),
        ("raise SystemExit(3)\n", 3, True),
    ],
)
def test_a_killed_process_is_known(program, text, status, is_answered):
    (program / "main.py").write_text(text)
    done = trial()
    assert (done.status, done.is_answered) == (status, is_answered)
    assert done.recording.finished == (status == 0)


def test_nothing_is_called_well_of_which_nothing_is_known(program):
    (program / "main.py").write_text("import os, torch\nprint('gone')\nos._exit(0)\n")
    found = find_fixes(("script", "main.py", ()), Limits(), lambda _: None, lambda _: "", program)
    assert found.is_incomplete
    assert [problem.key for problem in found.problems] == ["fix.no_answer"]
    assert found.output == "gone\n"
