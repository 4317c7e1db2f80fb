"""``pytest --gradsan``, in pytest runs of its own."""

import pytest

pytest_plugins = ["pytester"]

SILENT = """
import torch

def test_silent():
    w = torch.ones(3, requires_grad=True)
    y = w * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = y.exp()
    with torch.no_grad():
        z.add_(1)
    z.sum().backward()
"""
RAISED = """
import pytest
import torch

def broken():
    w = torch.ones(3, requires_grad=True)
    y = w.exp()
    y += 1
    y.sum().backward()

def test_expected():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        broken()

def test_raising():
    broken()
"""
CLEAN = """
import torch

def test_clean():
    w = torch.ones(3, requires_grad=True)
    w.exp().sum().backward()
    assert w.grad is not None
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("GRADSAN_TEXT", "strict")

    def run(text, *words):
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *words)

    return run


def test_without_the_option_nothing_is_imported(run):
    text = (
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n    assert 'gradsan' not in sys.modules\n"
    )
    run(text).assert_outcomes(passed=1)


def test_a_silent_conflict_fails_the_test(run):
    run(SILENT).assert_outcomes(passed=1)
    done = run(SILENT, "--gradsan")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*GS201*", "*test_silent: GS201 hidden_by_saved_tensor_hooks (*:9)"])


def test_a_raised_conflict_is_explained_and_judged_by_the_test(run):
    done = run(RAISED, "--gradsan=watch")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*RuntimeError*", "*error*GS101*", "*test_raising: GS101 result_overwritten (*:7)"])


def test_a_clean_test_stays_clean(run):
    done = run(CLEAN, "--gradsan")
    done.assert_outcomes(passed=1)
    assert "GS" not in done.stdout.str()


def test_the_ini_file_and_off(run, pytester):
    pytester.makeini("[pytest]\ngradsan = watch\n")
    run(SILENT).assert_outcomes(failed=1)
    run(SILENT, "--gradsan=off").assert_outcomes(passed=1)


def test_markers(run):
    marked = SILENT.replace("def test_silent", "import pytest\n@pytest.mark.gradsan\ndef test_silent")
    run(marked).assert_outcomes(failed=1)
    run(marked.replace("mark.gradsan", "mark.gradsan('off')"), "--gradsan").assert_outcomes(passed=1)
    run(marked.replace("mark.gradsan", "mark.gradsan('all')")).assert_outcomes(failed=1)


def test_wrong_values_are_one_sentence(run, pytester):
    pytester.makeini("[pytest]\ngradsan = loud\n")
    done = run(CLEAN)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*gradsan = loud: it takes watch, deep, heal, off*"])


def test_with_xdist(run):
    pytest.importorskip("xdist")
    done = run(SILENT, "--gradsan", "-n", "2")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*test_silent: GS201 hidden_by_saved_tensor_hooks (*:9)"])


def test_chinese(run, pytester):
    pytester.makeini("[pytest]\ngradsan_language = zh\n")
    run(SILENT, "--gradsan").stdout.fnmatch_lines(["*在保存之后被覆盖*"])
