"""DDP and FSDP2 on two ranks: what is found, that it is the same on both, and that the trainings are the same."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import parallel_scenarios
import pytest
from job import run_pair

from cases import each
from example_programs import kept

FOUND = {
    "ddp_step_between_forward_and_backward": "GS110",
    "ddp_update_by_hand": "GS110",
    "all_reduce_in_place": "GS207",
    "fsdp_step_between_forward_and_backward": "GS217",
    "fsdp_update_by_hand": "GS217",
    "fsdp_second_backward_after_a_step": "GS217",
    "fsdp_update_before_the_recomputation": "GS210",
    "a_long_run": "GS202",
}
"""What both ranks are to be told; nothing where a scenario is not named."""
ON_RANK_1 = {
    "ddp_buffers_synchronised_while_a_graph_waits": "GS207",
    "a_conflict_on_one_rank_only": "GS202",
}
NAMES = [function.__name__ for function in parallel_scenarios.SCENARIOS]
every_scenario = each("name", NAMES)
every_mode = pytest.mark.parametrize("mode", ["watch", "deep"])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each rank has found, by scenario and mode; run once for all workers."""

    def run() -> list[dict]:
        folder = tmp_path_factory.mktemp("parallel")
        ended = run_pair(folder, str(Path(parallel_scenarios.__file__)), "found", timeout=480)
        assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
        assert "Traceback" not in ended[0].stderr + ended[1].stderr
        return [json.loads((folder / f"found.{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]

    return kept(("parallel scenarios",), run)


@every_mode
@every_scenario
def test_findings_of_each_scenario(told, name, mode):
    for rank in (0, 1):
        code = FOUND.get(name) or (ON_RANK_1.get(name) if rank == 1 else None)
        assert told[rank][f"{name} {mode}"]["codes"] == ([] if code is None else [code]), told[rank][f"{name} {mode}"]


@every_mode
@every_scenario
def test_the_training_is_the_same_with_it(told, name, mode):
    assert all(one[f"{name} {mode}"]["same"] for one in told), [one[f"{name} {mode}"]["value"] for one in told]


@every_mode
@each("name", [name for name, code in FOUND.items() if code == "GS217"])
def test_parameters_gathered_again(told, name, mode):
    said = told[0][f"{name} {mode}"]
    assert said["silent"]
    assert any(one.startswith("module.") and one.endswith(".weight") for one in said["tensors"]), said["tensors"]
    source, first = inspect.getsourcelines(getattr(parallel_scenarios, name))
    written = "parameter.mul_(2)" if name == "fsdp_update_by_hand" else "optimizer.step()"
    assert said["lines"] == [first + number for number, line in enumerate(source) if written in line]
    assert "gathered anew" in said["text"]


@every_mode
def test_the_sync_of_buffers_says_what_to_do(told, mode):
    said = told[1][f"ddp_buffers_synchronised_while_a_graph_waits {mode}"]
    assert said["tensors"] == ["module.module.scale"]
    assert "forward_sync_buffers=False" in " ".join(said["text"].split())


@every_mode
def test_a_long_run_keeps_one_finding_and_a_bounded_log(told, mode):
    from gradsan.record.raw_stacks import WRITES_KEPT

    said = told[0][f"a_long_run {mode}"]
    assert said["counts"] == [parallel_scenarios.ROUNDS]
    assert said["kept"] <= WRITES_KEPT
    assert len(said["text"].splitlines()) < 40
