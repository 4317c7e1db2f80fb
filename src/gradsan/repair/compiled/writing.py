"""Self-contained program that reproduces the wrong result of a part of a compiled graph, without the user's code."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch

from gradsan.repair.compiled.parts import Part

_HEAD = '''"""A part of a compiled graph that computes something else than eager code; written by gradsan compare.

torch {torch}, backend {backend}. Exit status 1: they differ.{more}
"""

import math
import operator

import torch
from torch import device, inf, nan

ALLOWED = {allowed!r}


def part({names}):
{body}


def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


def run(function, overwrites):
    """Results, and gradients of the arguments for gradients of ones."""
    given = inputs()
    results = [one for one in function(*given) if torch.is_tensor(one)]
    kept = [one.detach().clone() for one in results]
    if overwrites:
        with torch.no_grad():
            given[{position}].add_(1.0)
    roots = [one for one in results if one.requires_grad]
    leaves = [one for one in given if torch.is_tensor(one) and one.requires_grad]
    torch.manual_seed(1)
    given_back = [torch.randn_like(one) for one in roots]
    return kept, torch.autograd.grad(roots, leaves, given_back, allow_unused=True) if roots and leaves else ()


def apart(right, tried):
    """The largest relative difference of two lists of tensors."""
    largest = 0.0
    for one, other in zip(right, tried):
        if one is not None and other is not None and one.is_floating_point():
            one, other = one.detach().double(), other.detach().double()
            size = float(one.norm()) or 1.0
            largest = max(largest, float((one - other).norm()) / size)
    return largest


def compare():
    compiled = torch.compile(part, backend={call})
    right, tried = run(part, False), run(compiled, {overwrites})
    return apart(right[0], tried[0]), apart(right[1], tried[1])


if __name__ == "__main__":
    results, gradients = compare()
    print(f"results differ by {{results:.2g}}, gradients by {{gradients:.2g}}; rounding allows {{ALLOWED:.2g}}")
    raise SystemExit(max(results, gradients) > ALLOWED)
'''
_OVERWRITTEN = """
Argument {position} is overwritten between forward and backward: eager code raises there, compiled code goes on."""
_OWN_BACKEND = """
The backend is the program's own: import it here."""


def program_of(
    part: Part, backend: str, compile_with: Any, overwritten: int | None, allowed: float
) -> tuple[str, bytes]:
    """The text of the program, and its arguments' values where random ones of their shapes do not show the difference.

    A program that needs such values reads them from the file of its own name with the suffix ``.pt``.
    """
    is_own = _registered(backend) is None
    random = [_made(one, needs) for one, needs in _needs(part)]
    text = _text(part, backend, overwritten, allowed, [f"        {one}," for one in random])
    if is_own or _shows(text, allowed):
        return text, b""
    stored = io.BytesIO()
    torch.save(list(part.call.arguments), stored)
    flags = tuple(needs for _, needs in _needs(part))
    lines = [
        "        one.requires_grad_(needs) if needs else one",
        f'        for one, needs in zip(torch.load(__file__ + ".pt"), {flags!r})',
    ]
    return _text(part, backend, overwritten, allowed, lines), stored.getvalue()


def _text(part: Part, backend: str, overwritten: int | None, allowed: float, lines: list[str]) -> str:
    known = _registered(backend)
    more = "" if overwritten is None else _OVERWRITTEN.format(position=overwritten)
    code = part.module.graph.python_code("self").src
    body = code[code.index(":\n", code.index("def forward")) + 2 :]
    # Remove early releases of variables, and annotations.
    body = re.sub(r";  ?\w+(?: = \w+)* = None", "", body)
    body = re.sub(r"^(\s+\w+) : [^=]+ = ", r"\1 = ", body, flags=re.M)
    return _HEAD.format(
        torch=torch.__version__,
        backend=backend,
        more=more + (_OWN_BACKEND if known is None else ""),
        allowed=float(f"{allowed:.2g}"),
        names=", ".join(_names(part)),
        body=body.rstrip().strip("\n"),
        inputs="\n".join(lines),
        position=overwritten or 0,
        call=repr(known or backend),
        overwrites=overwritten is not None,
    )


def _names(part: Part) -> list[str]:
    return [node.name for node in part.module.graph.nodes if node.op == "placeholder"]


def _registered(backend: str) -> str | None:
    """``backend`` where torch itself knows one of that name."""
    return backend if backend in ("inductor", "eager", *torch.compiler.list_backends(exclude_tags=())) else None


def _shows(text: str, allowed: float) -> bool:
    variables: dict[str, Any] = {"__name__": "part", "__file__": "part"}
    with contextlib.suppress(Exception):
        torch.compiler.reset()
        import linecache

        # torch.compile reads the source of the traced code.
        linecache.cache["<part>"] = (len(text), None, text.splitlines(keepends=True), "<part>")
        exec(compile(text, "<part>", "exec"), variables)
        return bool(max(variables["compare"]()) > allowed)
    return False


def _needs(part: Part) -> list[tuple[Any, bool]]:
    flags = iter(part.call.needs_grad)
    return [(one, next(flags) if torch.is_tensor(one) else False) for one in part.call.arguments]


def _made(one: Any, needs: bool) -> str:
    if not torch.is_tensor(one):
        return repr(one)
    shape, dtype = tuple(one.shape), str(one.dtype)
    where = "" if one.device.type == "cpu" else f", device={str(one.device)!r}"
    if one.dtype is torch.bool:
        made = f"torch.rand({shape}{where}) > 0.5"
    elif not one.is_floating_point():
        low, high = (int(one.min()), int(one.max()) + 1) if one.numel() else (0, 1)
        made = f"torch.randint({low}, {high}, {shape}, dtype={dtype}{where})"
    else:
        mean, spread = _statistics(one)
        made = f"torch.randn({shape}, dtype={dtype}{where})"
        made += f" * {spread:.3g}" if spread != 1.0 else ""
        made += f" + {mean:.3g}" if mean else ""
    if one.numel() and not one.is_contiguous() and 0 not in one.stride():
        made = f"torch.empty_strided({shape}, {tuple(one.stride())}, dtype={dtype}{where}).copy_({made})"
    return f"({made}).requires_grad_()" if needs else made


def _statistics(one: Any) -> tuple[float, float]:
    values = one.detach().double()
    mean = float(values.mean()) if one.numel() else 0.0
    spread = float(values.std()) if one.numel() > 1 else 0.0
    if not (mean == mean and spread == spread):
        return 0.0, 1.0
    return float(f"{mean:.3g}"), float(f"{spread:.3g}")
