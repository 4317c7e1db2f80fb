"""The GitHub Action's own script, run as a runner would: annotations and SARIF count from the repository's root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
BROKEN = "import torch\nw = torch.ones(3, requires_grad=True)\nh = w.exp()\nh += 1\nh.sum().backward()\n"


@pytest.mark.skipif(sys.platform == "win32", reason="runners have bash; this test does without")
def test_paths_count_from_the_repository_and_the_status_is_the_programs(tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    run, upload = action["runs"]["steps"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gradsan").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gradsan "$@"\n')
    (tmp_path / "bin" / "gradsan").chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    folder = tmp_path / "repository" / "examples"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(BROKEN, encoding="utf-8")
    folder_of = {"working-directory": "examples"}
    asked = {"program": "train.py --epochs 1", "options": "--quiet", "sarif": "found.sarif", **folder_of}
    assert asked.keys() < action["inputs"].keys()
    env = {name: asked[value.removeprefix("${{ inputs.").removesuffix(" }}")] for name, value in run["env"].items()}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", run["run"]],
        cwd=tmp_path / "repository",
        env={**os.environ, **env, "PATH": path, "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    [error] = [line for line in done.stdout.splitlines() if line.startswith("::error")]
    assert "file=examples/train.py,line=5" in error
    [result] = json.loads((tmp_path / "repository" / "found.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("examples/train.py", 5)
    assert upload["uses"].startswith("github/codeql-action/upload-sarif@")
    assert upload["with"]["sarif_file"] == action["outputs"]["sarif"]["value"]
    assert "inputs.upload == 'true'" in upload["if"]
