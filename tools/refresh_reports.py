"""Put into the READMEs what gradsan really says about the examples.

    python tools/refresh_reports.py            rewrite the report of every README that shows one
    python tools/refresh_reports.py --check    change nothing; exit with 1 where a README shows something else

A report stands between ``<!-- report:start -->`` and ``<!-- report:end -->``. It is what ``gradsan run`` writes under
the traceback of the example's ``train.py``, 100 columns wide, in English, without colour, with paths as seen from the
repository's root. It depends on the versions of torch and transformers, and on a Python whose code objects know columns
(3.11 or newer).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

START, END = "<!-- report:start -->", "<!-- report:end -->"

EXAMPLES = ("gan", "hierarchical_bert", "image_classifier", "leaf_update", "rnn_sequence")

READMES: Mapping[str, tuple[str, ...]] = {
    name: (f"examples/{name}/README.md", *(("README.md",) if name == "gan" else ())) for name in EXAMPLES
}
"""The files that show the report of each example's ``train.py``, from the repository's root."""

_TIMEOUT_S = 300


def gradsan_run(program: str, *arguments: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``gradsan run`` on ``program``, a path from the repository's root, as the READMEs show it.

    ``options`` are further options of gradsan's, and stronger than the ones used here. Returns the finished process
    with its output as text, whatever its exit status. Raises subprocess.TimeoutExpired.
    """
    words, environment = gradsan_command(program, *arguments, options=options)
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_TIMEOUT_S,
        check=False,
    )


def gradsan_command(
    program: str, *arguments: str, options: Sequence[str] = ()
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The words behind ``python``, and the environment, of :func:`gradsan_run`."""
    environment = {name: value for name, value in os.environ.items() if name != "GRADSAN_OPTIONS"}
    environment |= {"COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    return ("-m", "gradsan", "run", "--color", "never", "--lang", "en", *options, program, *arguments), environment


def report_in(stderr: str) -> str:
    """The report, in any language, that ``stderr`` ends with; empty where there is none."""
    start = re.search(r"^\w+\[GS\d+\][:：]", stderr, re.MULTILINE)
    return stderr[start.start() :].rstrip() if start else ""


def shown_report(readme: str) -> str:
    """The report between the marks of ``readme``. Raises ValueError where there is not one pair of marks."""
    return _split(readme)[1].strip().removeprefix("```text").removesuffix("```").strip("\n")


def with_report(readme: str, report: str) -> str:
    """``readme`` with ``report`` between its marks. Raises ValueError where there is not one pair of marks."""
    before, _, after = _split(readme)
    return f"{before}{START}\n```text\n{report}\n```\n{END}{after}"


def _split(readme: str) -> tuple[str, str, str]:
    parts = re.split(f"{re.escape(START)}|{re.escape(END)}", readme)
    if (readme.count(START), readme.count(END)) != (1, 1) or readme.index(START) > readme.index(END):
        raise ValueError(f"expected one {START} and, after it, one {END}")
    return parts[0], parts[1], parts[2]


def main() -> int:
    """Rewrite or check; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where a README differs")
    check = parser.parse_args().check
    stale = 0
    for example in EXAMPLES:
        done = gradsan_run(f"examples/{example}/train.py")
        report = report_in(done.stderr)
        if not report:
            print(f"examples/{example}/train.py: no report\n{done.stderr}", file=sys.stderr)
            return 1
        for path in READMES[example]:
            readme = (ROOT / path).read_text(encoding="utf-8")
            fresh = with_report(readme, report)
            if fresh == readme:
                continue
            stale += 1
            print(f"{path}: {'out of date' if check else 'rewritten'}")
            if not check:
                (ROOT / path).write_text(fresh, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
