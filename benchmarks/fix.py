"""Time of ``gradsan fix``, as a multiple of the plain failing run.

    python benchmarks/fix.py                  a toy and the README's GAN, Markdown on stdout
    python benchmarks/fix.py --only toy --rounds 5

Each round runs the program plainly, as it fails, and then `gradsan fix` on it, one after the other; the ratio is taken
within the round, so that what slows the machine for a while touches both. The table has the median of the rounds and
their range. Nothing is kept between rounds: every search is a whole one.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page import machine, machine_line, table

TOY = """\
import torch

torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    scale = net(torch.randn(8, 3)).exp()
    scale += 1
    scale.mean().backward()
    optimizer.step()
"""
EXAMPLES = Path(__file__).parent.parent / "examples"


@dataclass(frozen=True)
class Program:
    """``goal`` is the ratio that is not to be passed on a quiet machine."""

    file: Path
    goal: float


@dataclass(frozen=True)
class Round:
    """Seconds of one plain run, and of one search."""

    plain: float
    fix: float


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="toy or gan")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        toy = Path(folder, "toy.py")
        toy.write_text(TOY, encoding="utf-8")
        programs = {"toy": Program(toy, 2.5), "gan": Program(EXAMPLES / "gan" / "train.py", 4.0)}
        chosen = {name: one for name, one in programs.items() if options.only in ("", name)}
        rows = [_row(name, one, [_round(one) for _ in range(options.rounds)]) for name, one in chosen.items()]
    print(machine_line(machine()))
    print(table(("program", "plain run (s)", "gradsan fix (s)", "ratio", "range", "goal"), rows))


def _round(program: Program) -> Round:
    command = [program.file.name]
    plain = _seconds([sys.executable, *command], program.file.parent, 1)
    fix = _seconds([sys.executable, "-m", "gradsan", "fix", *command], program.file.parent, 0)
    return Round(plain, fix)


def _seconds(command: Sequence[str], folder: Path, status: int) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != status:
        raise SystemExit(f"{command}: status {done.returncode} instead of {status}\n{done.stderr}")
    return seconds


def _row(name: str, program: Program, rounds: Sequence[Round]) -> tuple[str, ...]:
    ratios = [one.fix / one.plain for one in rounds]
    return (
        name,
        f"{statistics.median(one.plain for one in rounds):.1f}",
        f"{statistics.median(one.fix for one in rounds):.1f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}",
        f"{program.goal:g}",
    )


if __name__ == "__main__":
    main()
