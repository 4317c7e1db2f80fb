"""Programs of tests on a device, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openreg


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the modules of simulated devices on its path."""
    path = os.pathsep.join([str(Path(__file__).parent), str(openreg.installed()), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=250,
        check=False,
    )
