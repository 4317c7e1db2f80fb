"""Trials leave no trace: files that a program writes go to scratch copies, which it reads back as its own."""

import subprocess
import sys
import textwrap
from dataclasses import replace

from cases import each
from gradsan.launch.program import Target
from gradsan.repair import Limits, Patch, find_fixes
from gradsan.repair.trials.harmless import is_harmless
from gradsan.repair.trials.runner import Runner
from gradsan.repair.trials.trial import Request
from gradsan.text import say

WRITES = """
import gzip, json, logging, os, shutil, tempfile
from pathlib import Path
import numpy as np, torch
logging.basicConfig(filename="train.log", level=logging.INFO)
print("resumed", os.path.exists("model.pt") and torch.load("model.pt")["n"])
with open("log.txt", "a") as log:
    log.write("start\\n")
    print(log.name, Path("log.txt").read_text())
os.makedirs("runs/exp", exist_ok=True)
Path("runs/exp/settings.json").write_text(json.dumps({"a": 1}))
print(sorted(os.listdir(".")), [str(path) for path in sorted(Path(".").glob("runs/**/*"))])
os.remove("old.txt")
print(os.path.exists("old.txt"), sorted(path.name for path in Path(".").iterdir()))
refused = [lambda: open("old.txt"), lambda: os.mkdir("runs"), lambda: os.rmdir("runs"), lambda: open("no/file", "w")]
refused += [lambda: os.remove("no"), lambda: open("runs", "w"), lambda: open("log.txt", "x"), lambda: os.listdir("no")]
for one in refused:
    try:
        print(one())
    except OSError as failure:
        print(failure)
shutil.copy("data.txt", "copy.txt")
shutil.rmtree("folder")
print(os.path.isdir("folder"))
os.makedirs("folder")
print(os.listdir("folder"))
os.rename("copy.txt", "folder/moved.txt")
os.replace("data.txt", "other.txt")
print(os.listdir("folder"), Path("other.txt").read_text(), Path("data.txt").exists())
logging.info("hello")
print(open("train.log").read())
os.chdir("runs")
print(os.path.relpath(os.getcwd(), HOME), os.path.relpath(os.path.abspath("x"), HOME), os.listdir("exp"))
open("here.txt", "w").write("x")
os.chdir("..")
for n in range(2):
    torch.save({"n": n}, "model.tmp")
    os.replace("model.tmp", "model.pt")
print(torch.load("model.pt")["n"], sorted(os.listdir("runs")))
shutil.move("runs", "runs2")
print(sorted(str(path) for path in Path("runs2").rglob("*")), [name for _, _, name in os.walk("runs2")])
with tempfile.TemporaryDirectory() as inner, tempfile.NamedTemporaryFile() as file:
    open(inner + "/a", "w").write("1")
    shutil.make_archive("packed", "gztar", inner)
np.savez("a.npz", x=np.ones(2))
with gzip.open("z.gz", "wt") as packed:
    packed.write("zz")
torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), "scripted.pt")
torch.jit.load("scripted.pt")
reader = torch._C.PyTorchFileReader
print(torch.load("model.pt", mmap=True)["n"], isinstance(reader("model.pt"), reader))
torch.from_file("shared.bin", shared=True, size=4)[:] = 2.0
print(np.fromfile("shared.bin", dtype=np.float32))
os.symlink("log.txt", "link.txt")
with open("link.txt", "r+") as file:
    file.seek(0)
    file.write("S")
print(open("log.txt").read(), os.path.islink("link.txt"), os.stat("log.txt").st_size, np.load("a.npz")["x"])
with os.scandir(".") as entries:
    print(sorted((one.name, one.is_dir(), one.is_symlink()) for one in entries))
"""
FAULT = """
w = torch.ones(3, requires_grad=True)
scale = w.exp()
scale += 1
scale.sum().backward()
"""


def folder_of(tmp_path, name, text):
    folder = tmp_path / name
    (folder / "folder").mkdir(parents=True)
    for file, content in (("data.txt", "data"), ("old.txt", "old"), ("log.txt", "first\n"), ("folder/inner", "")):
        (folder / file).write_text(content)
    (folder / "main.py").write_text(f"HOME = {str(folder)!r}\n{textwrap.dedent(text)}")
    return folder


def contents(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


UNCOVERED = {
    "import subprocess; subprocess.run(['touch', 'made_by_run'])": ("starts", "touch made_by_run"),
    "import os; os.system('echo a > made_by_shell')": ("starts", "echo a > made_by_shell"),
    "import sqlite3; sqlite3.connect('made_by_sqlite').execute('create table a(b)')": ("writes", "made_by_sqlite"),
    "import io; io.FileIO('made_by_file', 'w')": ("writes", "made_by_file"),
    "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()": ("starts", "spawn_main"),
}


def test_a_program_sees_what_it_writes_and_its_folder_stays_as_it_is(tmp_path, monkeypatch):
    plain, led = (folder_of(tmp_path, name, WRITES) for name in ("plain", "led"))
    before = contents(led)
    done = subprocess.run([sys.executable, "main.py"], cwd=plain, capture_output=True, text=True, check=True)
    monkeypatch.chdir(led)
    with Runner(Target("script", "main.py")) as runner:
        request = Request(("script", "main.py", ()), "watch", {}, 20, 60.0)
        found = runner.run(request)
        patches = [Patch({str(led / "main.py"): f"import torch\n{line}\n".encode()}) for line in UNCOVERED]
        requests = [replace(request, files=dict(one.files)) for one in patches]
        ended = runner.run_all(requests)
        after = contents(led)
        agreed = runner.run_all([replace(one, lets_through=True) for one in requests])
    assert found.output == done.stdout, found.output
    assert {str(led / name) for name in ("log.txt", "old.txt", "model.pt", "runs2")} <= set(found.changed_files)
    own = [one for one in found.read_files if one.startswith(str(tmp_path))]
    assert own == [str(led / name) for name in ("data.txt", "main.py")]
    for one, (kind, what) in zip(ended, UNCOVERED.values(), strict=True):
        assert one.uncovered is not None, what
        assert (one.uncovered[0], one.uncovered[2]) == (kind, (str(led / "main.py"), 2))
        assert what in one.uncovered[1]
    assert after == before
    assert [(one.uncovered, one.status) for one in agreed] == [(None, 0)] * len(agreed)
    made = {name for name in contents(led) if name.startswith("made")}
    assert made == {"made_by_run", "made_by_shell", "made_by_sqlite", "made_by_file"}


def test_a_search_asks_first_and_runs_nothing_where_nobody_agrees(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "led", f"import os, torch\nos.system('echo a >> made'){FAULT}")
    monkeypatch.chdir(folder)
    asked = []

    def search(answer):
        def agree(question):
            asked.append(say(question, "en"))
            return answer

        return find_fixes(("script", "main.py", ()), Limits(), lambda _: None, lambda _: "", folder, agree)

    assert search(False).is_incomplete
    assert not (folder / "made").exists()
    assert asked == [
        "the program starts echo a >> made (main.py:3); what that writes cannot be kept aside, and every trial "
        "starts it again"
    ]
    found = search(True)
    assert (found.lets_through, bool(found.patches)) == (True, True)


@each(
    ("command", "is_harmless_to_run"),
    [
        ("git rev-parse --short HEAD", True),
        ("git -C .. status", True),
        ("git commit -am x", False),
        ("/bin/sh -c 'nvidia-smi -L'", True),
        ("nvidia-smi > gpus", False),
        ("/bin/sh -c 'ls; rm x'", False),
        ("python make.py", False),
    ],
)
def test_commands_that_only_show_something_are_harmless(command, is_harmless_to_run):
    assert is_harmless(command, None) is is_harmless_to_run
