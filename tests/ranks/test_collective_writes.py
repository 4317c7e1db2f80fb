"""Collectives into values that autograd has saved, and a child process into shared memory: the verdict is the truth."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from job import own_environment, run_pair

from forked import warm_python

# docs/blind-spots.md, "Writes past the version counter": a collective that is called as an operator.
WATCH_MISSES = {f"torch.ops._c10d_functional {saved}" for saved in ("into_an_operand", "into_a_buffer")}
FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[str]]]:
    ended = run_pair(tmp_path_factory.mktemp("job"), str(FOLDER / "collective_writes.py"))
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    told = [json.loads(one.stdout.splitlines()[-1]) for one in ended]
    return {name: {rank: one[name] for rank, one in enumerate(told)} for name in told[0]}


def test_the_verdict_on_each_rank_is_the_truth(cells: dict[str, dict[int, list[str]]]) -> None:
    surprises = {}
    for name, by_rank in cells.items():
        for rank, (truth, watch, deep) in by_rank.items():
            expected = "right" if name in WATCH_MISSES and truth == "wrong" else truth
            if (watch, deep) != (expected, truth):
                surprises[name, rank] = f"truth {truth}, watch {watch}, deep {deep}"
    assert surprises == {}


def test_the_table_has_every_kind_of_truth(cells: dict[str, dict[int, list[str]]]) -> None:
    assert {one[0] for by_rank in cells.values() for one in by_rank.values()} == {"right", "wrong", "raises"}
    assert cells["broadcast into_a_buffer"][0][0] == "right", "the sender keeps its value"
    assert cells["broadcast into_a_buffer"][1][0] == "wrong", "the receiver does not"


def test_memory_that_a_child_process_writes() -> None:
    done = subprocess.run(
        [warm_python()[0], str(FOLDER / "shared_memory.py")],
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"plain": "wrong", "watch": "wrong", "deep": "wrong", "heal": "healed"}
