"""Random programs, and what gradsan says of them, held against a reference that writes no memory.

    python benchmarks/fuzz.py --programs 200000 --jobs 2

runs the programs of as many seeds, from ``--seed`` on. The programs, the reference and the judge are those of
``tests/oracle``. Each disagreement is made as small as it gets and written to ``--out``, as a program that runs by
itself and as the data that ``tests/oracle/regressions.py`` takes. The exit status is 1 where there was one.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import multiprocessing
import os
import pprint
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_ORACLE = Path(__file__).resolve().parent.parent / "tests" / "oracle"
_AT_ONCE = 100
_BATCHES_OF_A_PROCESS = 5


class Disagreement(NamedTuple):
    """A program of which gradsan says something else than the truth, made small."""

    seed: int
    complaints: list[str]
    source: str
    data: str

    def __str__(self) -> str:
        """Text that can be run, with the data as comments."""
        said = "".join(f"# {line}\n" for line in self.complaints)
        data = "".join(f"# {line}\n" for line in self.data.splitlines())
        return f"# seed {self.seed}\n{said}{self.source}\n{data}"


class Batch(NamedTuple):
    """What became of some programs: how many by verdict, and the disagreements."""

    verdicts: collections.Counter[str]
    disagreements: list[Disagreement]


def run_batch(first: int, count: int) -> Batch:
    """The programs of ``count`` seeds from ``first`` on."""
    warnings.simplefilter("ignore")
    generate, judge, statements = (_part(name) for name in ("generate", "judge", "statements"))
    truths = [(seed, judge.accepted(generate.program(seed))) for seed in range(first, first + count)]
    verdicts = collections.Counter("nothing to compare" if one is None else one.verdict for _, one in truths)
    kept = [(seed, one) for seed, one in truths if one is not None]
    found = []
    for (seed, truth), complaints in zip(kept, judge.complaints([one for _, one in kept]), strict=True):
        if complaints:
            small, said = _shrunk(truth, complaints)
            found.append(Disagreement(seed, said, statements.source(small), pprint.pformat(small, width=110)))
    return Batch(verdicts, found)


def _shrunk(truth: Any, complaints: list[str]) -> tuple[Any, list[str]]:
    judge, shrink = _part("judge"), _part("shrink")
    small = judge.accepted(shrink.shrunk(truth.program, shrink.kinds_of(complaints)))
    said = judge.complaints([small])[0]
    # What shows in a batch only is told as it was.
    return (small.program, said) if said else (truth.program, complaints)


def _part(name: str) -> Any:
    if str(_ORACLE) not in sys.path:
        sys.path.insert(0, str(_ORACLE))
    return importlib.import_module(name)


def main() -> int:
    """Run as told on the command line; 1 where gradsan and the reference disagree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--out", type=Path, default=Path("disagreements.txt"), help="where disagreements are written")
    asked = parser.parse_args()
    if asked.out.is_dir() or not asked.out.parent.is_dir():
        parser.error(f"--out must name a file that can be written, not {asked.out}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    firsts = range(asked.seed, asked.seed + asked.programs, _AT_ONCE)
    sizes = [min(_AT_ONCE, asked.seed + asked.programs - first) for first in firsts]
    verdicts: collections.Counter[str] = collections.Counter()
    disagreements: list[Disagreement] = []
    began = time.monotonic()
    # Processes of their own, and new ones from time to time: gradsan's logs are bounded, but not small.
    processes = multiprocessing.get_context("spawn").Pool(asked.jobs, maxtasksperchild=_BATCHES_OF_A_PROCESS)
    with processes as pool, _progress() as progress:
        task = progress.add_task("programs", total=asked.programs, found=0)
        for batch in pool.imap_unordered(_run_one, zip(firsts, sizes, strict=True)):
            verdicts += batch.verdicts
            disagreements += batch.disagreements
            for one in batch.disagreements:
                with asked.out.open("a") as out:
                    out.write(f"{one}\n\n")
            progress.update(task, advance=sum(batch.verdicts.values()), found=len(disagreements))
    _summary(verdicts, disagreements, time.monotonic() - began, asked.out)
    return 1 if disagreements else 0


def _run_one(batch: tuple[int, int]) -> Batch:
    return run_batch(*batch)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("disagreements: {task.fields[found]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


def _summary(verdicts: collections.Counter[str], disagreements: list[Disagreement], seconds: float, out: Path) -> None:
    total = sum(verdicts.values())
    print(f"{total:,} programs in {seconds:,.0f} s")
    for verdict, count in verdicts.most_common():
        print(f"  {verdict:20} {count:9,}")
    print(f"disagreements: {len(disagreements):,}" + (f", in {out}" if disagreements else ""))


if __name__ == "__main__":
    sys.exit(main())
