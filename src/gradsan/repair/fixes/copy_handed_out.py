"""Memory that is handed out of PyTorch as a copy: what is written there then reaches no saved value."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes._clones import clone_what_is_given


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``.clone()`` behind what ``x.numpy()``, ``np.asarray(x)`` or ``to_dlpack(x)`` takes its memory from."""
    if diagnosis.cause != "memory_alias":
        return ()
    return clone_what_is_given(diagnosis, "copy_handed_out", _whose_memory)


def _whose_memory(call: ast.Call) -> ast.expr | None:
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return next(iter(call.args), None)
