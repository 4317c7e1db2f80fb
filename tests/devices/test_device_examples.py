"""The programs in examples/ with the device as torch's default device: codes and lines are those of the CPU."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from device_runs import run_python

from example_programs import BROKEN, EXAMPLES

CODES = {
    "gan": "GS110",
    "hierarchical_bert": "GS105",
    "image_classifier": "GS105",
    "leaf_update": "GS110",
    "rnn_sequence": "GS111",
}
_NOT_RUN = "the device cannot run it"
START = """\
import importlib
import runpy
import sys

import torch

device = sys.argv[1]
module = {"simulated": "simulated", "openreg": "torch_openreg"}.get(device.partition(":")[0])
if module:
    importlib.import_module(module)
torch.set_default_device(device)

class Generator(torch.Generator):
    def __new__(cls, device=device):
        return super().__new__(cls, device)

if not module:  # it draws from no generator of the CPU's
    torch.Generator = Generator
sys.argv[1:] = []
runpy.run_path("train.py", run_name="__main__")
"""


def run_on(device: str, folder: Path, example: str, *command: str) -> tuple[Any, str]:
    place = folder / example
    shutil.copytree(EXAMPLES / example, place, dirs_exist_ok=True)
    (place / "start.py").write_text(START, encoding="utf-8")
    done = run_python(place, *command, "start.py", device)
    report = place / "report.json"
    return json.loads(report.read_text(encoding="utf-8")) if report.exists() else None, done.stderr


def test_each_example_is_reported_as_on_the_cpu(device: str, tmp_path: Path) -> None:
    stopped_at = {name: line for name, arguments, line, _ in BROKEN if not arguments}

    def verdict(example: str) -> str:
        report, shown = run_on(device, tmp_path, example, "-m", "gradsan", "run", "--json", "report.json")
        if "is at version" not in shown:
            # One reads its pictures into memory of the CPU; openreg has no convolution.
            return _NOT_RUN
        [found] = report["diagnoses"]
        [used] = [label for label in found["labels"] if label["role"] == "used"]
        line = (EXAMPLES / example / Path(used["file"]).name).read_text(encoding="utf-8").splitlines()[used["line"] - 1]
        is_there = found["tensor"]["device"] == device
        as_expected = (found["code"], line.strip(), is_there) == (CODES[example], stopped_at[example], True)
        return "as on the CPU" if as_expected else f"{found['code']} at {line.strip()}, {found['tensor']['device']}"

    with ThreadPoolExecutor(2) as pool:
        verdicts = dict(zip(CODES, pool.map(verdict, CODES), strict=True))
    ran = {name: one for name, one in verdicts.items() if one != _NOT_RUN}
    assert len(ran) >= 3, verdicts
    assert set(ran.values()) == {"as on the CPU"}, verdicts
