"""Errors that nobody watched: explained at the end of a program, on request, and before any backward."""

import os
import subprocess
import sys

import pytest
import torch

import gradsan
from forked import run_forked

FAILING = """\
import torch

def scaled(weight):
    hidden = weight.exp()
    hidden *= 2
    return hidden.sum()

weight = torch.ones(3, requires_grad=True)
scaled(weight).backward()
"""


def run(folder, program, is_warm=True):
    """The ended process of a program; a cold one starts its Python as users do, a warm one has torch imported."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSAN", "LC_", "LANG"))}
    strict = {"LC_ALL": "C.UTF-8", "GRADSAN_TEXT": "strict", "GRADSAN_DEBUG": "1", "OMP_NUM_THREADS": "1"}
    if is_warm:
        return run_forked(["program.py"], folder, {**environment, **strict})
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={**environment, **strict},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_error_that_ends_the_program_is_explained_after_its_traceback(tmp_path):
    done = run(tmp_path, f"import gradsan\ngradsan.install()\n{FAILING}", is_warm=False)
    traceback, found, report = done.stderr.partition("error[GS101]")
    assert done.returncode == 1
    assert found
    assert "modified by an inplace operation" in traceback
    assert "hidden *= 2" in report


def test_installing_imports_no_torch_and_changes_no_other_error(tmp_path):
    done = run(
        tmp_path, "import sys, gradsan\ngradsan.install()\nprint('torch' in sys.modules)\n{}['missing']", is_warm=False
    )
    plain = run(tmp_path, "import sys\n\nprint(False)\n{}['missing']", is_warm=False)
    assert done.stdout == plain.stdout == "False\n"
    assert done.stderr == plain.stderr


def test_an_error_in_a_thread_is_explained_too(tmp_path):
    body = FAILING.replace("scaled(weight).backward()", "")
    program = (
        f"import gradsan, threading\ngradsan.install()\n{body}\n"
        "thread = threading.Thread(target=lambda: scaled(weight).backward())\nthread.start()\nthread.join()\n"
        "print('went on')\n"
    )
    done = run(tmp_path, program)
    assert done.returncode == 0
    assert done.stdout == "went on\n"
    assert "error[GS101]" in done.stderr


def test_after_uninstall_nothing_is_explained(tmp_path):
    done = run(tmp_path, f"import gradsan\ngradsan.install()\ngradsan.uninstall()\n{FAILING}")
    assert done.returncode == 1
    assert "GS101" not in done.stderr


def test_an_exception_is_explained_on_request():
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    hidden *= 2
    with pytest.raises(RuntimeError) as caught:
        hidden.sum().backward()
    explained = gradsan.explain_exception(caught.value)
    (found,) = explained.diagnoses
    assert found.code == "GS101"
    assert found.tensor.name == "hidden"
    assert found.confidence == "likely"
    assert str(explained).startswith("error[GS101]")


def test_a_graph_is_looked_through_before_any_backward():
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    hidden *= 2
    loss = hidden.sum()
    (found,) = gradsan.autopsy(loss).diagnoses
    assert found.code == "GS101"
    # Looking has switched nothing off.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_without_a_stale_value_has_no_findings():
    weight = torch.ones(3, requires_grad=True)
    assert gradsan.autopsy((weight.exp() + 1).sum()).diagnoses == ()
    with pytest.raises(ValueError, match="no graph"):
        gradsan.autopsy(torch.ones(3))
