"""An optimizer without its fused kernels: PyTorch then counts the step, and stops where it computed a wrong gradient.

That mends nothing by itself; tried, it shows that it was the step, and the program fails as loudly as it should.
"""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import leaf_name
from gradsan.source.tree import SourceFile


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``fused=False`` where a file of the stacks makes an optimizer of the class whose step wrote."""
    if diagnosis.cause != "fused_optimizer":
        return ()
    classes = {label.op.partition(".")[0] for label in blocks.labels(diagnosis, "written") if label.op}
    lines = blocks.lines_in_files(diagnosis, lambda source: _unfused(source, classes))
    return (blocks.fix("disable_fused", lines),) if lines else ()


def _unfused(source: SourceFile, classes: set[str]) -> Change | None:
    edits = [
        Edit(source.span(keyword.value), "False")
        for call in ast.walk(source.module)
        if isinstance(call, ast.Call) and leaf_name(call.func) in classes
        for keyword in call.keywords
        if keyword.arg == "fused" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    ]
    return edited(source, edits, "disable_fused")
