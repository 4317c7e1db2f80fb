"""Findings are printed or written to disk, in whichever process they were made and however it ended."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from side_by_side import Outcome, Runner

CHILDREN = """
import multiprocessing as mp, os, signal, subprocess, sys, traceback, torch

SILENT = "x = torch.ones(3, requires_grad=True); y = x.exp(); y.data.add_(1); y.sum().backward()"
FRESH = '''
import torch
x = torch.ones(3, requires_grad=True)
y = x.sin()
x.data.add_(1)
y.sum().backward()
print("fresh")
'''

def silent():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.data.add_(1)
    y.sum().backward()

def raising():
    x = torch.ones(3, requires_grad=True)
    try:
        x.add_(1)
    finally:
        sys.stderr.close()

def killed():
    x = torch.ones(3, requires_grad=True)
    y = x.tanh()
    y.data.add_(1)
    y.sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)

def run(target, method="fork"):
    child = mp.get_context(method).Process(target=target)
    child.start()
    child.join()
    print(method, target.__name__, child.exitcode, flush=True)

if __name__ == "__main__":
    run(silent)
    run(raising)
    run(killed)
    run(silent, "spawn")
    for words, env in (([FRESH], None), (["-u", "-c", "print('alone')"], {"PATH": os.environ["PATH"]})):
        words = words if env else ["-c", *words]
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)
        print(done.stdout, done.returncode, flush=True)
    subprocess.run([sys.executable, "-c", "import sys; print('gradsan' in sys.modules)"])
    try:
        subprocess.run(["no-such-program"])
    except FileNotFoundError as error:
        print(any("gradsan" in frame.filename for frame in traceback.extract_tb(error.__traceback__)), flush=True)
    left = os.fork()
    if left == 0:
        exec("x = torch.ones(3, requires_grad=True); y = x.cos(); x.data.add_(1); y.sum().backward()")
        os._exit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(left, 0)[1]), flush=True)
    # Nobody waits for this one but python itself, at the very end.
    mp.get_context("fork").Process(target=silent, name="last").start()
"""


def finding(report: Path) -> dict[str, Any]:
    return json.loads(report.read_text())


PRINTED = """\
fork silent 0
fork raising 1
fork killed -9
spawn silent 0
fresh
 0
alone
 0
False
False
5
"""
"""As under plain ``python``."""


def test_children_are_watched_or_named(tmp_path: Path, run_gradsan: Runner) -> None:
    (tmp_path / "main.py").write_text(CHILDREN)
    watched = run_gradsan("run", "--json", "out.json", "main.py", env={"TMPDIR": str(tmp_path)})
    assert watched.stdout == PRINTED
    assert watched.status == 66, "a child's conflict is the run's"
    report = finding(tmp_path / "out.json")
    found = {(one["code"], one["tensor"] and one["tensor"]["op"]): one for one in report["diagnoses"]}
    assert set(found) == {
        ("GS202", "ExpBackward0"),
        ("GS301", None),
        ("GS202", "TanhBackward0"),
        ("GS202", "SinBackward0"),
        ("GS202", "CosBackward0"),
    }, watched.stderr
    exp = found["GS202", "ExpBackward0"]
    assert exp["count"] == 3
    assert [name.partition("-")[0].partition(" ")[0] for name in exp["sources"]] == [
        "ForkProcess",
        "SpawnProcess",
        "last",
    ]
    assert [label["file"] for label in exp["labels"]] == ["main.py"] * 3
    assert all("a/main.py" in fix["diff"] for fix in exp["fixes"] if fix["lines"])
    assert any("found in 3 processes" in note for note in exp["notes"])
    spots = report["seen"]["blind_spots"]
    assert any("python -u -c print('alone') was not watched" in spot for spot in spots)
    assert any("was ended from outside" in spot for spot in spots)
    assert len(spots) == 2, "nothing is said of children that were watched to their end, or that have no torch"
    assert report["seen"]["processes"] == 1 + 7
    assert "python -u -c print('alone') was not watched" in " ".join(watched.stderr.split())
    assert list(tmp_path.glob("gradsan-*/*")) == [], "nothing is left behind"


SILENT = """
import os, signal, sys, threading, torch
x = torch.ones(3, requires_grad=True)
y = x.exp()
y.data.add_(1)
y.sum().backward()
print("lost in the buffer", end="")
"""


STUCK = """
lock = threading.Lock()
lock.acquire()
thread = threading.Thread(target=lock.acquire)
thread.start()
def end():
    while threading.main_thread().is_alive():
        thread.join(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=end).start()
"""
"""A thread that waits for ever, and what ends such a program when its last line has been run."""


OUTLIVED = """
import time
if os.fork():
    os._exit(0)
while os.path.exists(os.environ["GRADSAN"]):
    time.sleep(0.01)
z = x.sin()
x.data.add_(1)
z.sum().backward()
os._exit(0)
"""


def test_ends_that_python_does_not_see(tmp_path: Path, run_gradsan: Runner, run_warm: Runner) -> None:
    ends = {
        "leaves.py": "os._exit(0)",
        "thread.py": "threading.Thread(target=os._exit, args=(3,)).start(); signal.pause()",
        "killed.py": "os.kill(os.getpid(), signal.SIGTERM)",
        "stuck.py": STUCK,
        "outlived.py": OUTLIVED,
    }
    told = {}
    for name, end in ends.items():
        (tmp_path / name).write_text(SILENT + end + "\n")
        # In a warm process what outlives the program is ended with it.
        run = run_gradsan if name == "outlived.py" else run_warm
        told[name] = run("run", "--json", f"{name}.json", name, env={"TMPDIR": str(tmp_path)})
        assert told[name].stdout == "", "what os._exit drops under python is dropped here"
        report = finding(tmp_path / f"{name}.json")
        assert [one["code"] for one in report["diagnoses"]] == ["GS202"]
        assert report["program"]["ended"] == (name != "killed.py")
        assert report["program"]["outcome"] == ("finished" if name in ("leaves.py", "outlived.py") else "failed")
    assert [told[name].status for name in ends] == [66, 3, -15, -15, 66]
    assert ["GS202" in told[name].stderr for name in ends] == [True, True, False, True, True]
    assert told["outlived.py"].stderr.count("error[GS202]") == 2, "a child that outlives the run tells for itself"
    assert "still running when this was written" in finding(tmp_path / "killed.py.json")["seen"]["blind_spots"][0]
    left = list(tmp_path.glob("gradsan-*/*/*-*.json"))
    assert len(left) == 1, "where no file was named, it is here that a killed run's findings are"
    shown: Outcome = run_warm("report", env={"TMPDIR": str(tmp_path)})
    assert "error[GS202]" in shown.stdout
    assert str(left[0]) in shown.stderr
    # A folder that is not there would be read as the system's own, where other runs leave theirs.
    (tmp_path / "none").mkdir()
    assert run_warm("report", env={"TMPDIR": str(tmp_path / "none")}).status == 2


ENABLED = """
import logging, os, sys, torch, gradsan
first = dict(vars(torch.Tensor)), sys.excepthook, os._exit, dict(os.environ)
gradsan.enable()
x = torch.ones(3, requires_grad=True)
y = x.exp()
y += 1
try:
    y.sum().backward()
except RuntimeError as error:
    print("str", str(error).count("gradsan"), len(getattr(error, "__notes__", "1")))
    logging.exception("training failed")
if os.fork() == 0:
    z = x.sin()
    x.data.add_(1)
    z.sum().backward()
    sys.exit(0)
os.wait()
if sys.argv[1] == "disable":
    with gradsan.watch() as inner:
        pass
    report = gradsan.disable()
    last = dict(vars(torch.Tensor)), sys.excepthook, os._exit, dict(os.environ)
    print([one.code for one in report.diagnoses], [a == b for a, b in zip(first, last)], inner.diagnoses)
else:
    x.add_(1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_enable_keeps_what_the_readme_promises(tmp_path: Path, run_python: Runner) -> None:
    (tmp_path / "main.py").write_text(ENABLED)
    env = {"GRADSAN_OPTIONS": "json=out.json:lang=en", "GRADSAN_TEXT": "strict", "TMPDIR": str(tmp_path)}
    ended = run_python("main.py", "end", env=env)
    assert ended.status == 1, "the program's own"
    traceback, _, report = ended.stderr.partition("x.add_(1)\n")
    assert "training failed" in traceback
    assert "GS101" in traceback, "the note that logging shows"
    shown, _, report = report.partition("error[GS101]")
    assert "a leaf Variable that requires grad" in shown
    assert "GS301" in shown, "the note of the exception that nobody catches"
    assert "GS202" in report, "the child's"
    assert "GS301" in report
    written = finding(tmp_path / "out.json")
    assert [one["code"] for one in written["diagnoses"]] == ["GS101", "GS301", "GS202"]
    assert (written["program"]["outcome"], written["program"]["ended"]) == ("failed", True)

    (tmp_path / "out.json").unlink()
    quiet = run_python("main.py", "disable", env=env, is_warm=True)
    assert quiet.status == 0
    assert "error[" not in quiet.stderr.partition("training failed")[2].partition("gradsan: error[GS101]")[2]
    assert quiet.stdout.splitlines()[-1] == "['GS101', 'GS202'] [True, True, True, True] ()"
    assert [one["code"] for one in finding(tmp_path / "out.json")["diagnoses"]] == ["GS101", "GS202"]
    assert list(tmp_path.glob("gradsan-*/*")) == []


def test_a_wrong_option_is_said_and_enabling_goes_on(tmp_path: Path, run_python: Runner) -> None:
    program = "import gradsan, torch; gradsan.enable(); print(gradsan.disable().mode)"
    done = run_python(
        "-c", textwrap.dedent(program), env={"GRADSAN_OPTIONS": "jsno=x", "TMPDIR": str(tmp_path)}, is_warm=True
    )
    assert (done.stdout, done.status) == ("watch\n", 0)
    assert done.stderr.startswith("gradsan: in GRADSAN_OPTIONS: there is no option 'jsno'")
    assert done.stderr.count("\n") == 1
