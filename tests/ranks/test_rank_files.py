"""Ranks as the environment gives them, and the names of their files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cases import each
from gradsan.launch.ranks import Rank, own_files, rank_of, rank_path
from gradsan.options import Options


@each(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Rank(1, 2)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
        ({"RANK": "first", "WORLD_SIZE": "2"}, None),
    ],
)
def test_the_rank(environment, rank):
    assert rank_of(environment) == rank


@each(
    ("path", "named"),
    [
        ("out.json", "out.rank1.4711.json"),
        ("a.b/out", "a.b/out.rank1.4711"),
        ("/logs/run.3.json", "/logs/run.3.rank1.4711.json"),
        (".hidden", ".hidden.rank1.4711"),
    ],
)
def test_the_name_of_a_file(path, named):
    assert rank_path(path, Rank(1, 2), 4711) == named


def test_every_file_that_is_written_gets_one_and_no_other(tmp_path: Path):
    options = Options(json="a.json", html="b.html", sarif="/dev/null", write_baseline="c.json", baseline="d.json")
    assert own_files(options, None, tmp_path) == options
    own = own_files(options, Rank(1, 4), tmp_path)
    mark = f"rank1.{os.getpid()}"
    assert (own.json, own.html, own.write_baseline) == (f"a.{mark}.json", f"b.{mark}.html", f"c.{mark}.json")
    assert (own.sarif, own.baseline) == ("/dev/null", "d.json")


ENDED = """
import os, signal
from gradsan.launch.ranks import Rank, undisturbed
if {own}:
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
with undisturbed({rank}):
    os.kill(os.getpid(), signal.SIGTERM)
    print("written", flush=True)
print("went on", flush=True)
"""


@pytest.mark.parametrize(
    ("rank", "own", "said", "status"),
    [
        (Rank(0, 2), False, ["written"], -signal.SIGTERM),
        (Rank(0, 2), True, ["asked", "written", "went on"], 0),
        (None, False, [], -signal.SIGTERM),
    ],
    ids=["a rank finishes its report", "the program's own handler", "a process that is alone"],
)
def test_a_rank_ended_while_writing_leaves_a_whole_report(rank, own, said, status):
    program = ENDED.format(own=own, rank=rank)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split("\n")[:-1], done.returncode) == (said, status), done.stderr
