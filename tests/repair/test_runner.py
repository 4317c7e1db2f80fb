"""Trials in children of a warm server: what is imported ahead, and how each of them ends."""

import os
import sys
import textwrap

import pytest

from cases import each
from gradsan.launch.program import Target
from gradsan.repair.patch import Patch
from gradsan.repair.trials.preload import Preload
from gradsan.repair.trials.runner import Runner
from gradsan.repair.trials.trial import Request


def preload(tmp_path, monkeypatch, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Preload()
    found.read(str(tmp_path / "main.py"))
    return found


def test_installed_modules_are_named_and_those_of_the_user_are_read(tmp_path, monkeypatch):
    found = preload(
        tmp_path,
        monkeypatch,
        main="""
            import json, own_one
            from own_two import thing
            try:
                import numpy.linalg as la
            except ImportError:
                la = None
            if la:
                import wave
            def later():
                import xml
        """,
        own_one="raise RuntimeError\nimport no_such_module\n",
        own_two="from torch.optim import SGD\nraise RuntimeError\n",
    )
    assert found.modules == ["json", "torch.optim:SGD", "numpy.linalg"]
    assert (found.has_optimizers, found.is_known, found.environment) == (True, True, {})


@each(
    ("line", "environment", "is_known"),
    [
        ('os.environ["MODE_OF_TEST"] = "a"', {"MODE_OF_TEST": "a"}, True),
        ('os.environ.setdefault("MODE_OF_TEST", "a")', {"MODE_OF_TEST": "a"}, True),
        ('mode = os.environ["HOME"]', {}, True),
        ('os.environ["MODE_OF_TEST"] = str(1)', {}, False),
        ("os.environ.update(MODE_OF_TEST='a')", {}, False),
        ("import torch\nos.environ['MODE_OF_TEST'] = str(1)", {}, True),
    ],
)
def test_settings_before_the_imports_apply_to_them(tmp_path, monkeypatch, line, environment, is_known):
    found = preload(tmp_path, monkeypatch, main=f"import os\n{line}\nimport torch\n")
    assert (found.environment, found.is_known) == (environment, is_known)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every trial has a fresh process")
def test_each_trial_is_a_process_of_its_own(tmp_path, monkeypatch):
    file = tmp_path / "main.py"
    file.write_text("import os, sys, time, torch\nprint(os.getpid(), flush=True)\nEND = 'well'\n")
    monkeypatch.chdir(tmp_path)

    def ending(line, timeout=60.0):
        patch = Patch().with_lines(((str(file), 3, line),))
        return Request(("script", "main.py", ()), "watch", patch.files, 0, timeout)

    lines = ("open('log', 'a').write('x')", "sys.exit(3)", "os.kill(os.getpid(), 9)", "raise ValueError('mine')")
    with Runner(Target("script", "main.py")) as runner:
        ended = runner.run_all([ending(line) for line in lines], side_by_side=2)
        late = runner.run(ending("time.sleep(60)", timeout=1.0))
        assert runner.is_warm
    assert [one.status for one in (*ended, late)] == [0, 3, -9, 1, None]
    assert [one.is_answered for one in ended] == [True, True, False, True]
    assert "ValueError: mine" in ended[3].output
    assert ended[3].failed_at == (str(file), 3)
    # Each writes a copy of its own.
    assert ended[0].changed_files == (str(tmp_path / "log"),)
    assert not any(one.runs_alone for one in ended)
    assert not (tmp_path / "log").exists()
    pids = {one.output.split()[0] for one in (*ended, late)}
    assert len(pids) == 5
    assert str(os.getpid()) not in pids
