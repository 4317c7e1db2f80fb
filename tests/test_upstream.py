"""The runner for PyTorch's own tests: what it calls a difference, and what it reads back when it is run again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location("upstream", Path(__file__).parents[1] / "tools" / "upstream.py")
assert _SPEC is not None
assert _SPEC.loader is not None
upstream = importlib.util.module_from_spec(_SPEC)
sys.modules["upstream"] = upstream
_SPEC.loader.exec_module(upstream)


def test_only_tests_of_which_no_two_runs_agree_differ(tmp_path: Path) -> None:
    def write(mode: str, *rows: tuple[str, str, str]) -> None:
        lines = [json.dumps({"test": test, "status": status, "detail": detail}) for test, status, detail in rows]
        (tmp_path / f"test_it.{mode}.jsonl").write_text("\n".join([*lines, '{"test": "T.cut']))

    passed, failed = ("passed", ""), ("failed", "RuntimeError: at 0x7f00")
    write("plain", ("T.same", *failed), ("T.words", *failed), ("T.broken", *passed), ("T.shaky", *passed))
    write(
        "watch",
        ("T.same", "failed", "RuntimeError: at 0x7fff"),
        ("T.words", "failed", "ValueError: at 0x7f00"),
        ("T.broken", *failed),
        ("T.shaky", *failed),
        ("T.shaky", *passed),
    )
    plain, watch = (upstream.read(tmp_path / f"test_it.{mode}.jsonl") for mode in ("plain", "watch"))
    assert list(plain) == ["T.same", "T.words", "T.broken", "T.shaky"]
    assert upstream.differing(plain, watch) == ["T.words", "T.broken"]
    text, count = upstream.table(tmp_path, [Path("test_it.py")], ["plain", "watch"])
    assert count == 2
    assert "| test_it | watch | 4 | 2 | 2 | 1 | 3 | 0 | 0 |" in text
