"""``pytest --gradsan``, in pytest runs of its own: few runs, each of a whole suite, as starting torch takes longest."""

from __future__ import annotations

import pytest

import gradsan_pytest
from forked import warm_python

pytest_plugins = ["pytester"]

PROGRAMS = """
import pytest
import torch

def silent():
    w = torch.ones(3, requires_grad=True)
    y = w * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = y.exp()
    with torch.no_grad():
        z.add_(1)
    z.sum().backward()

def broken():
    w = torch.ones(3, requires_grad=True)
    y = w.exp()
    y += 1
    y.sum().backward()
    return w.grad
"""
SUITE = {
    "programs": PROGRAMS,
    "test_silent": """
        from programs import silent

        def test_silent():
            silent()
        """,
    "test_raised": """
        import pytest
        from programs import broken

        def test_expected():
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                broken()

        def test_raising():
            broken()
        """,
    "test_clean": """
        import torch

        def test_clean():
            w = torch.ones(3, requires_grad=True)
            w.exp().sum().backward()
            assert w.grad is not None
        """,
    "test_marked": """
        import pytest
        import torch
        from programs import broken, silent

        @pytest.mark.gradsan
        def test_marked():
            silent()

        @pytest.mark.gradsan("off")
        def test_left_alone():
            silent()

        @pytest.mark.gradsan(mode="heal")
        def test_healed():
            torch.testing.assert_close(broken(), torch.ones(3).exp())

        @pytest.mark.gradsan("all")
        def test_wrongly_marked():
            silent()
        """,
}
COMMENTED = """
    import torch

    def test_commented():
        curve = torch.ones(3, requires_grad=True).exp()
        curve.data.add_(1)  # gradsan: ignore[GS202] meant
        curve.sum().backward()
    """
SILENT_ROW = "test_silent.py::test_silent: GS201 hidden_by_saved_tensor_hooks (programs.py:10)"
EXPECTED_ROW = "test_raised.py::test_expected: GS101 result_overwritten (programs.py:16)"
RAISED_ROW = "test_raised.py::test_raising: GS101 result_overwritten (programs.py:16)"
MARKED_ROW = "test_marked.py::test_marked: GS201 hidden_by_saved_tensor_hooks (programs.py:10)"
HEALED_ROW = "test_marked.py::test_healed: GS101 result_overwritten (programs.py:16)"


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("GRADSAN_TEXT", "strict")
    return lambda *words: pytester.runpytest_subprocess("-p", "no:cacheprovider", *words)


@pytest.fixture
def run_warm(pytester, monkeypatch):
    """With torch imported already: where what is tested is not how pytest is started."""
    monkeypatch.setenv("GRADSAN_TEXT", "strict")
    python, own = warm_python()
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    where = f"--basetemp={pytester.path / 'basetemp'}"
    return lambda *words: pytester.run(python, "-m", "pytest", where, "-p", "no:cacheprovider", *words)


@pytest.fixture
def suite(pytester, run_warm):
    """Run the whole suite; what failed comes by the names of the tests, sorted."""
    for name, text in SUITE.items():
        pytester.makepyfile(**{name: text})

    def run_suite(*words, run=run_warm):
        done = run("-rf", *words)
        failed = [line.split("::")[1].split()[0] for line in done.outlines if line.startswith("FAILED ")]
        return done, sorted(failed)

    return run_suite


def rows(done):
    """The lines of gradsan's own section at the end."""
    lines = done.outlines
    first = next(number for number, line in enumerate(lines) if line.strip("= ") == "gradsan" and line[0] == "=")
    return sorted(line for line in lines[first + 1 :] if ": GS" in line)


def test_without_the_option_nothing_is_imported(run, pytester):
    pytester.makepyfile("import sys\ndef test_it():\n    assert not {'torch', 'gradsan'} & set(sys.modules)\n")
    run().assert_outcomes(passed=1)


def test_every_test_is_watched_and_has_findings_of_its_own(suite):
    done, failed = suite("--gradsan")
    assert failed == ["test_marked", "test_raising", "test_silent", "test_wrongly_marked"]
    done.assert_outcomes(passed=4, failed=4)
    done.stdout.fnmatch_lines(["*RuntimeError: one of the variables needed*", "*error*GS101*"])
    # One test expected its error: it is told of all the same.
    assert rows(done) == sorted([EXPECTED_ROW, RAISED_ROW, SILENT_ROW, MARKED_ROW, HEALED_ROW])
    done.stdout.fnmatch_lines(["*@pytest.mark.gradsan('all'): it takes watch, deep, heal, off*"])


def test_the_option_is_stronger_than_the_ini_file_and_a_marker_than_the_option(suite, pytester):
    pytester.makeini("[pytest]\ngradsan = watch\n")
    done, failed = suite("--gradsan=off")
    assert failed == ["test_marked", "test_raising", "test_wrongly_marked"]
    assert rows(done) == sorted([MARKED_ROW, HEALED_ROW])


def test_the_ini_file_asks_and_chooses_the_language(suite, pytester, run):
    """And what is not wanted fails no test, whether a comment says so or the project's rules."""
    pytester.makeini("[pytest]\ngradsan = watch\ngradsan_language = zh\n")
    pytester.makepyprojecttoml('[tool.gradsan]\nignore = ["GS101"]\n')
    pytester.makepyfile(test_commented=COMMENTED)
    done, failed = suite("test_silent.py", "test_raised.py", "test_commented.py", run=run)
    assert failed == ["test_raising", "test_silent"], "an error stays one"
    assert rows(done) == [SILENT_ROW]
    done.stdout.fnmatch_lines(["*在保存之后被覆盖*"])


def test_deep_mode_with_xdist(suite):
    pytest.importorskip("xdist")
    done, failed = suite("--gradsan=deep", "-n", "2")
    assert failed == ["test_marked", "test_raising", "test_silent", "test_wrongly_marked"]
    assert rows(done) == sorted([EXPECTED_ROW, RAISED_ROW, SILENT_ROW, MARKED_ROW, HEALED_ROW])
    done.stdout.fnmatch_lines(["*gradients are off by (relative): w 0.37"])


def test_wrong_values_are_one_sentence(run, pytester):
    pytester.makepyfile("def test_it(): pass")
    pytester.makeini("[pytest]\ngradsan = loud\n")
    done = run()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*gradsan = loud: it takes watch, deep, heal, off*"])


def test_a_report_that_cannot_be_made_is_no_end_of_the_run(request):
    class Broken:
        diagnoses = ()

        @property
        def report(self):
            raise LookupError("a word is missing")

    assert "LookupError: a word is missing" in gradsan_pytest._described(Broken(), request.config)[1]
