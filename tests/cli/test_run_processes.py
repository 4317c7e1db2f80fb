"""Children of a program: they start and end as under python, are watched once they import torch, and report to it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from side_by_side import Runner

POOL = """
import multiprocessing, os, sys

class Thing:
    def __init__(self, number):
        self.number = number

def work(thing):
    main = sys.modules["__main__"]
    seen = sorted(name for name in sys.modules if name.split(".")[0] == "gradsan")
    return Thing(thing.number + 1), __name__, main.__name__, sys.argv, sys.path[0], METHOD == "fork" or seen

METHOD = sys.argv[1]
print("imported as", __name__, flush=True)

if __name__ == "__main__":
    context = multiprocessing.get_context(METHOD)
    with context.Pool(1) as pool:
        for thing, *facts in pool.map(work, [Thing(1), Thing(2)]):
            print(thing.number, facts)
    failing = context.Process(target=sys.exit, args=(3,))
    failing.start()
    failing.join()
    print(failing.exitcode)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("words", [["main.py"], ["-m", "main"], ["folder"]], ids=" ".join)
def test_multiprocessing(method: str, words: list[str], tmp_path: Path, beside_python: Runner) -> None:
    (tmp_path / "main.py").write_text(POOL)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(POOL)
    if words == ["folder"] and method != "fork":
        pytest.skip("under python itself, children of a folder's __main__.py do not find its classes")
    plain = beside_python(*words, method)
    assert "2 [" in plain.stdout
    assert plain.stderr == ""


def test_multiprocessing_from_code(beside_python: Runner) -> None:
    code = (
        "import multiprocessing as m; c = m.get_context('spawn'); p = c.Pool(1); print(p.map(abs, [-1])); p.terminate()"
    )
    assert beside_python("-c", code).stdout == "[1]\n"


def test_child_that_fails_prints_its_own_traceback(tmp_path: Path, run_python: Runner, run_gradsan: Runner) -> None:
    source = """
    import multiprocessing
    def work():
        raise ValueError("in the child")
    if __name__ == "__main__":
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        print(child.exitcode)
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(source))
    plain, watched = run_python("main.py"), run_gradsan("run", "main.py")
    assert watched == plain


def test_forked_child_leaves_file_and_status_to_its_parent(tmp_path: Path, run_with_session: Runner) -> None:
    source = """
    import os, sys, torch
    child = os.fork()
    if child == 0:
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists("out.json"))
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(source))
    watched = run_with_session("error", "run", "--json", "out.json", "main.py")
    assert watched.stdout == "0 False\n"
    assert watched.status == 66
    assert json.loads((tmp_path / "out.json").read_text())["diagnoses"]


DATALOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((2,), float(index)), torch.utils.data.get_worker_info().id

def first(batch):
    return torch.utils.data.default_collate(batch)

if __name__ == "__main__":
    torch.manual_seed(0)
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), 2, num_workers=1, collate_fn=first, multiprocessing_context=method)
        layer = torch.nn.Linear(2, 1)
        for batch, worker in loader:
            layer.zero_grad()
            layer(batch).sum().backward()
            print(method, worker.tolist(), layer.weight.grad.tolist(), "gradsan" in sys.modules)
"""


def test_workers_of_a_dataloader(tmp_path: Path, run_warm: Runner) -> None:
    """The values are those of plain python: a row of a batch, its worker, the gradient of a sum."""
    (tmp_path / "main.py").write_text(DATALOADER)
    watched = run_warm("run", "main.py")
    gradients = (1.0, 5.0, 9.0, 13.0)
    expected = [f"{way} [0, 0] [[{one}, {one}]] True" for way in ("fork", "spawn") for one in gradients]
    assert watched.stdout.splitlines() == expected
    assert (watched.stderr, watched.status) == ("", 0)
