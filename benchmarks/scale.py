"""Growth of gradsan's cost: memory and time per operation and write with many live saves, and time of a report.

    python benchmarks/scale.py                              Markdown on stdout
    python benchmarks/scale.py --write docs/performance.md  put the tables between the page's markers

Every measurement runs in a process of its own (``scale_probes.py``), once plain and once watched; what gradsan adds is
the difference. The million live saves need about 2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsan.record.log import native_available
from page import machine, machine_line, page_with, replace_between, table
from scale_items import ITEMS

PROBES = Path(__file__).with_name("scale_probes.py")


def probe(name: str, mode: str, **parameters: Any) -> Any:
    """Run one measurement in a new process; its result. Raises CalledProcessError where it fails."""
    request = json.dumps({"probe": name, "mode": mode, **parameters})
    print(f"{name}, {mode}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, str(PROBES), request], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def memory_table(modes: Sequence[str], held: int) -> tuple[str, dict[str, Any]]:
    """Bytes a live save takes beyond plain torch, and bytes a step leaves behind."""
    measured = {
        mode: {
            "save of an input": probe("memory", mode, saves=held, operation="sin")["bytes"],
            "save of a result": probe("memory", mode, saves=held, operation="sigmoid")["bytes"],
            "save by two lines in turn": probe("memory", mode, saves=held, operation="turns")["bytes"],
            "step that is over": probe("growth", mode, steps=10_000)["bytes"],
        }
        for mode in ("plain", *modes)
    }
    rows = [
        [what, f"{plain:,.0f}", *(f"{measured[mode][what] - plain:+,.0f}" for mode in modes)]
        for what, plain in measured["plain"].items()
    ]
    return table([f"bytes for each ({held:,} saves alive)", "plain", *modes], rows), measured


def live_table(modes: Sequence[str], counts: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Microseconds that gradsan adds to one operation, its backward and a write while many saves are alive."""
    measured = {mode: probe("live", mode, saves=list(counts)) for mode in ("plain", *modes)}
    whats = ("growing", "save", "use", "write")
    rows = []
    for number, count in enumerate(counts):
        plain = measured["plain"][number]
        for mode in modes:
            row = measured[mode][number]
            added = ["–" if plain[what] is None else f"{(row[what] - plain[what]) * 1e6:+.2f}" for what in whats]
            rows.append([f"{count:,}", mode, *added])
    head = ["live saves", "mode", "each operation on the way there", "one more operation", "its backward", "a write"]
    return table(head, rows), measured


def report_table(modes: Sequence[str], nodes: int) -> tuple[str, dict[str, Any]]:
    """Seconds from a failing backward to its report."""
    measured = {mode: probe("failing_graph", mode, nodes=nodes) for mode in ("plain", *modes)}
    rows = [[mode, f"{found['seconds']:.2f}", " ".join(found["codes"]) or "–"] for mode, found in measured.items()]
    return table([f"failing graph of {nodes:,} nodes", "seconds to the report", "diagnosis"], rows), measured


def items_table(modes: Sequence[str], counts: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """Microseconds that gradsan adds to each of few items, and to each of many."""
    rows, measured = [], {}
    for name in ITEMS:
        added: list[str] = []
        for count in counts:
            found = {mode: probe("items", mode, of=name, count=count)["seconds"] for mode in ("plain", *modes)}
            measured[f"{name}, {count}"] = found
            added += [f"{(found[mode] - found['plain']) * 1e6:+,.0f}" for mode in modes]
        rows.append([name, f"{found['plain'] * 1e6:,.0f}", *added])
    head = ["many of", f"plain, each of {counts[-1]:,}", *(f"{mode}, {count:,}" for count in counts for mode in modes)]
    return table(head, rows), measured


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write what was asked for."""
    parser = argparse.ArgumentParser(description="Measure how gradsan's cost grows with the size of the program.")
    parser.add_argument("--held", type=int, default=100_000, metavar="N", help="live saves when memory is measured")
    parser.add_argument("--saves", default="10,1000,100000,1000000", metavar="N,…", help="numbers of live saves")
    parser.add_argument("--graph", type=int, default=1_000_000, metavar="N", help="nodes of the failing graph")
    parser.add_argument("--items", default="500,8000", metavar="N,…", help="numbers of parameters, arrays, lines …")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers behind the tables")
    parser.add_argument(
        "--write", type=page_with("scale"), metavar="PAGE", help="put the tables between PAGE's scale markers"
    )
    options = parser.parse_args(arguments)
    counts = [int(count) for count in options.saves.split(",")]
    if any(low >= high for low, high in zip([0, *counts], counts, strict=False)):
        parser.error(f"--saves is a list of rising numbers; it is {options.saves}")

    modes = ("watch", "pure") if native_available() else ("watch",)
    memory, memory_measured = memory_table(modes, options.held)
    live, live_measured = live_table(modes, counts)
    report, report_measured = report_table(modes, options.graph)
    items, items_measured = items_table(("watch", "deep"), [int(count) for count in options.items.split(",")])
    facts = machine()
    text = (
        f"Memory, by resident size: what plain torch takes, and what gradsan adds.\n\n{memory}\n\n"
        f"Microseconds that gradsan adds, the plain time taken off.\n\n{live}\n\n"
        f"{report}\n\n"
        f"Microseconds that gradsan adds to each of few and of many, the first rounds included.\n\n{items}\n\n"
        f"{machine_line(facts)}\n"
    )
    print(text)
    if options.json:
        numbers = {"machine": facts, "memory": memory_measured, "live": live_measured, "report": report_measured}
        numbers["items"] = items_measured
        options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if options.write:
        replace_between(options.write, "scale", text)


if __name__ == "__main__":
    main()
