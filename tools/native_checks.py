"""The native core under AddressSanitizer, UndefinedBehaviorSanitizer, a debugging allocator and failing allocations.

    python tools/native_checks.py            # all of it; make test-native
    python tools/native_checks.py fuzz --programs 500

builds ``_native.c`` with the sanitizers into ``build/native`` and has Python import it from there, also in processes
that a step starts. The exit status is 1 where a step failed; each step's output lies in ``build/native/STEP.txt``.
Linux with gcc.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
SANITIZED, PLAIN = BUILD / "sanitized", BUILD / "plain"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g"
REPORT = re.compile(
    r"ERROR: (Address|Leak)Sanitizer|runtime error: |Fatal Python error|Debug memory block|_Py_NegativeRefcount"
)
FAILING = ROOT / "tests" / "record" / "native"
EXAMPLES = ("gan", "image_classifier", "leaf_update", "rnn_sequence")
"""Those that import no library beside torch and end within seconds."""

FINDER = '''"""Has gradsan import the native core from this folder."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

NAME = "gradsan.record._native"
(FILE,) = Path(__file__).parent.glob("_native*.so")


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        return importlib.util.spec_from_file_location(name, FILE)


sys.meta_path.insert(0, Finder())
'''


def build() -> None:
    """Compile the core with the sanitizers and without them, each beside what has Python import it from there."""
    sys.path.insert(0, str(ROOT))
    import hatch_build

    shutil.rmtree(BUILD, ignore_errors=True)
    for folder, flags in ((SANITIZED, SANITIZERS), (PLAIN, "-O1 -g")):
        folder.mkdir(parents=True)
        # With failing.h the core's own calls can be made to fail; until somebody does, they do not.
        os.environ["CFLAGS"] = f"{flags} -DPy_BUILD_CORE_MODULE=1 -include {FAILING / 'failing.h'}"
        os.environ["LDFLAGS"] = flags
        hatch_build.compile_extension(ROOT / hatch_build.PACKAGE / f"{hatch_build.MODULE}.c", folder)
        (folder / "sitecustomize.py").write_text(FINDER, encoding="utf-8")


def runtime(name: str) -> str:
    """The path of a sanitizer's runtime library."""
    command = [os.environ.get("CC", "gcc"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def sanitized() -> dict[str, str]:
    """The environment of a Python whose every allocation the sanitizer sees."""
    return {
        "LD_PRELOAD": " ".join(map(runtime, ("libasan.so", "libubsan.so"))),
        # Python keeps much until the process ends; what the core keeps is counted by tests/record/test_native_load.py.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(SANITIZED),
    }


def steps(programs: int, jobs: int = 2) -> dict[str, tuple[dict[str, str], list[list[str]]]]:
    """By name: what the environment has besides, and the commands, as words after ``python``."""
    core_tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "record").glob("test_core*.py"))
    # Sanitizers keep what is freed for a while, so memory is not counted under them; the tests' limits are not theirs.
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
    pytest += ["-o", "faulthandler_timeout=0"]
    scripts = [f"examples/{one}/{script}.py" for one in EXAMPLES for script in ("train", "fixed")]
    examples = [["-m", "gradsan", "run", script] for script in scripts]
    memory = "tests/record/test_native_load.py"
    plain = {"PYTHONPATH": str(PLAIN)}
    debug = {**plain, "PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1"}
    return {
        "tests": (sanitized(), [[*pytest, *core_tests, "-k", "not million and not leave_nothing_behind"]]),
        "examples": (sanitized(), examples),
        "fuzz": (sanitized(), [["benchmarks/fuzz.py", "--programs", str(programs), "--jobs", str(jobs)]]),
        "failing": (sanitized(), [["tests/record/native/failing_calls.py"]]),
        "debug": (debug, [[*pytest, *core_tests], ["tests/record/native/failing_calls.py"]]),
        "memory": (plain, [[*pytest, "--long", memory]]),
    }


def run_step(name: str, environment: dict[str, str], commands: list[list[str]]) -> bool:
    """Run a step's commands; whether all ended as they should, and no tool reported anything."""
    started = time.monotonic()
    own = {"OMP_NUM_THREADS": "1", "GRADSAN_NATIVE": "1"}
    is_right = True
    with (BUILD / f"{name}.txt").open("w", encoding="utf-8") as log:
        for words in commands:
            print(f"$ python {' '.join(words)}", file=log, flush=True)
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own, **environment}, stdout=log, stderr=log)
            # An example's broken program fails: that is what it is for.
            expected = (0, 1) if words[-1].endswith("train.py") else (0,)
            is_right &= done.returncode in expected
            print(f"exit status {done.returncode}", file=log, flush=True)
    found = sorted(set(REPORT.findall((BUILD / f"{name}.txt").read_text(encoding="utf-8", errors="replace"))))
    is_right &= not found
    print(f"{name}: {'passed' if is_right else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
    return is_right


def main() -> int:
    """Build, run the steps asked for, and give the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="*", help="which of tests, examples, fuzz, failing, debug, memory; all without")
    parser.add_argument("--programs", type=int, default=5000, help="how many random programs (5000)")
    parser.add_argument("--jobs", type=int, default=2, help="how many of them at a time (2)")
    options = parser.parse_args()
    known = steps(options.programs, options.jobs)
    if unknown := set(options.steps) - set(known):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    build()
    print(f"built {BUILD.relative_to(ROOT)} with {SANITIZERS}", flush=True)
    results = [run_step(name, *known[name]) for name in options.steps or known]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
