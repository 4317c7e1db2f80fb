"""Cost of gradsan per training step, beside PyTorch's own tools for autograd.

    python benchmarks/overhead.py                             all workloads, Markdown on stdout
    python benchmarks/overhead.py --only mlp,lstm --rounds 5  a quick look
    python benchmarks/overhead.py --modes watch,deep,heal     what deep and heal mode cost beside watch mode
    python benchmarks/overhead.py --write docs/performance.md put the table between the page's markers
    python benchmarks/overhead.py --device cuda               the same steps on a device, and a larger one

Every round runs a chunk of the same training steps once in each mode, one after the other, in an order that rotates;
the ratio is taken within the round, so that what slows the whole machine for a while touches both sides alike. The
table has the median of the rounds' ratios and, in brackets, the quartiles. "plain again" is a second plain chunk of
each round: how far it strays from 1 is the noise of the run. A mode is switched on before the chunk and warmed up by
a quarter as many steps: the table shows what a step costs in a run that goes on, not what switching on costs. (The
first steps are dearer, plain ones too, until CPython's caches know the wrappers.)
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import gradsan
from gradsan.record.log import native_available
from page import machine, machine_line, page_with, replace_between, table
from workloads import DEVICE_WORKLOADS, WORKLOADS, Step, Workload

PLAIN = "plain"
NATIVE_CORE = native_available()
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@contextmanager
def gradsan_on(native: bool, mode: Literal["watch", "deep", "heal", "nonfinite"] = "watch") -> Iterator[None]:
    """Gradsan in one of its modes, with the native core of capture or without it.

    Raises RuntimeError where gradsan did not see the steps, or saw more in them than a note: then the time means
    nothing.
    """
    gradsan.enable(mode, native=native)
    try:
        yield
    finally:
        report = gradsan.disable()
    if report is None or not report.seen.saves or any(one.severity != "note" for one in report.diagnoses):
        raise RuntimeError(f"these steps were to be watched without a finding; gradsan says {report}")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the steps; ``switch`` makes the context in which they run."""

    key: str
    title: str
    switch: Callable[[], AbstractContextManager[Any]]


def modes() -> tuple[Mode, ...]:
    """The modes this installation has, ``plain`` first."""
    watch = [Mode("watch", "gradsan watch", lambda: gradsan_on(NATIVE_CORE))]
    if NATIVE_CORE:
        watch.append(Mode("pure", "gradsan watch, pure Python", lambda: gradsan_on(False)))
    return (
        Mode(PLAIN, "plain", nullcontext),
        Mode("again", "plain again", nullcontext),
        *watch,
        Mode("deep", "gradsan deep", lambda: gradsan_on(NATIVE_CORE, "deep")),
        Mode("heal", "gradsan heal", lambda: gradsan_on(NATIVE_CORE, "heal")),
        Mode("nonfinite", "gradsan nonfinite", lambda: gradsan_on(NATIVE_CORE, "nonfinite")),
        Mode("anomaly", "anomaly mode", lambda: torch.autograd.set_detect_anomaly(True)),
        Mode("mutation", "allow_mutation_on_saved_tensors", torch.autograd.graph.allow_mutation_on_saved_tensors),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a mode over time of plain, by round."""

    rounds: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile."""
        if len(self.rounds) == 1:
            return self.rounds[0], self.rounds[0], self.rounds[0]
        low, median, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, median, high


@dataclass(frozen=True, slots=True)
class Result:
    """One row: ``plain_seconds`` is the median time of a plain step, ``ratios`` go by mode key."""

    workload: Workload
    steps: int
    plain_seconds: float
    ratios: dict[str, Ratio]


def chunk_seconds(step: Step, steps: int, mode: Mode, clock: Callable[[], float]) -> float:
    """Time of ``steps`` steps in ``mode``, after a quarter as many to warm up, until the device has done them."""
    gc.collect()
    with mode.switch():
        for _ in range(max(1, steps // 4)):
            step()
        wait_for_device()
        start = clock()
        for _ in range(steps):
            step()
        wait_for_device()
        return clock() - start


def wait_for_device() -> None:
    """Wait until the accelerator has done what it was given, where this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure(workload: Workload, chosen: Sequence[Mode], options: argparse.Namespace) -> Result:
    """Run one workload in all chosen modes, round by round."""
    clock = CLOCKS[options.clock]
    torch.manual_seed(0)
    with torch.device(options.device):
        step = workload.build()
    chunk_seconds(step, 3, chosen[0], clock)
    one = min(chunk_seconds(step, 3, chosen[0], clock) / 3 for _ in range(3))
    steps = max(1, round(options.chunk / one))
    for mode in chosen:
        chunk_seconds(step, 1, mode, clock)

    times: dict[str, list[float]] = {mode.key: [] for mode in chosen}
    for turn in range(options.rounds):
        first = turn % len(chosen)
        for mode in (*chosen[first:], *chosen[:first]):
            times[mode.key].append(chunk_seconds(step, steps, mode, clock))
        progress(f"{workload.key}: round {turn + 1} of {options.rounds}, {steps} steps each")
    plain = times.pop(PLAIN)
    ratios = {key: Ratio(tuple(a / b for a, b in zip(spent, plain, strict=True))) for key, spent in times.items()}
    return Result(workload, steps, statistics.median(plain) / steps, ratios)


def by_core(chosen: Sequence[Mode]) -> list[list[Mode]]:
    """The modes of each pass: those of the pure core come after all others, each pass with a plain of its own.

    No run uses both cores, and CPython's caches of a line that calls now C and now Python code serve neither: switched
    in turn, both were 0.2 of a small step slower.
    """
    pure = [mode for mode in chosen if mode.key == "pure"]
    others = [mode for mode in chosen if mode.key != "pure"]
    return [others, [others[0], *pure]] if pure else [others]


def joined(rows: Sequence[Result]) -> Result:
    """One row of a workload's passes; the plain step is the first pass's."""
    return replace(rows[0], ratios={key: ratio for row in rows for key, ratio in row.ratios.items()})


def progress(text: str) -> None:
    """Say on stderr where the run is: on one line of a terminal, else line by line."""
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{text:<70}" if not end else text, end=end, file=sys.stderr, flush=True)


def as_markdown(results: Sequence[Result], chosen: Sequence[Mode], facts: dict[str, str], rounds: int) -> str:
    """The table, and below it what the numbers depend on."""
    others = [mode for mode in chosen if mode.key != PLAIN]
    head = ["workload", "plain step", *(mode.title for mode in others), "aim for watch"]
    rows = []
    for result in results:
        cells = []
        for mode in others:
            low, median, high = result.ratios[mode.key].quartiles
            cells.append(f"{median:.3f} ({low:.3f}–{high:.3f})")
        rows.append(
            [result.workload.title, f"{result.plain_seconds * 1e3:.2f} ms", *cells, f"≤ {result.workload.aim:.2f}"]
        )
    core = "the native core" if NATIVE_CORE else "the pure Python core (no native core is installed)"
    notes = (
        f"Ratios of whole training steps to plain ones: median of {rounds} rounds (lower and upper quartile), "
        f"one thread, all modes in one process, the pure core's after the others; gradsan watch with {core}. "
        f"{machine_line(facts)}"
    )
    return f"{table(head, rows)}\n\n{notes}\n"


def as_json(results: Sequence[Result], facts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Everything measured, round by round."""
    return {
        "machine": facts,
        "native_core": NATIVE_CORE,
        "clock": options.clock,
        "rounds": options.rounds,
        "workloads": [
            {
                "key": result.workload.key,
                "title": result.workload.title,
                "aim": result.workload.aim,
                "steps_per_chunk": result.steps,
                "plain_step_seconds": result.plain_seconds,
                "ratios": {
                    key: dict(zip(("q1", "median", "q3"), ratio.quartiles, strict=True), rounds=ratio.rounds)
                    for key, ratio in result.ratios.items()
                },
            }
            for result in results
        ],
    }


def parse(arguments: Sequence[str] | None, known: Sequence[Mode]) -> argparse.Namespace:
    """Read the command line; an unknown workload or mode ends the program with a sentence."""
    parser = argparse.ArgumentParser(description="Time training steps under gradsan and beside it.")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="rounds for each workload (default 21)")
    parser.add_argument("--chunk", type=float, default=0.2, metavar="S", help="seconds of a plain chunk (default 0.2)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the steps run (default cpu)")
    parser.add_argument("--only", metavar="KEYS", help=f"of {','.join(w.key for w in WORKLOADS)}")
    parser.add_argument("--modes", metavar="KEYS", help=f"of {','.join(m.key for m in known[1:])}; plain always runs")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: where other programs share the cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's ratios")
    parser.add_argument(
        "--write", type=page_with("overhead"), metavar="PAGE", help="put the table between PAGE's overhead markers"
    )
    options = parser.parse_args(arguments)
    options.workloads = WORKLOADS if options.device == "cpu" else (*WORKLOADS, *DEVICE_WORKLOADS)
    if options.rounds < 1 or options.chunk <= 0:
        parser.error("--rounds is 1 or more, --chunk more than 0")
    for name, keys in (("only", [w.key for w in options.workloads]), ("modes", [m.key for m in known])):
        given = getattr(options, name)
        wanted = keys if given is None else given.split(",")
        if unknown := [key for key in wanted if key not in keys]:
            parser.error(f"--{name}: no {', '.join(unknown)}; there is {', '.join(keys)}")
        setattr(options, name, wanted)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write what was asked for."""
    known = modes()
    options = parse(arguments, known)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    chosen = [mode for mode in known if mode.key == PLAIN or mode.key in options.modes]
    asked = [workload for workload in options.workloads if workload.key in options.only]
    passes = [[measure(workload, one, options) for workload in asked] for one in by_core(chosen)]
    results = [joined(rows) for rows in zip(*passes, strict=True)]
    progress("")
    facts = machine()
    if options.device == "cuda":
        facts["processor"] += f" with {torch.cuda.get_device_name()}"
    text = as_markdown(results, chosen, facts, options.rounds)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(as_json(results, facts, options), indent=1) + "\n", encoding="utf-8")
    if options.write:
        replace_between(options.write, "overhead", text)


if __name__ == "__main__":
    main()
