"""Run programs that overwrite saved values under gradsan's heal mode and under torch's own context; write docs/heal.md.

Usage: ``python tools/compare_heal.py > docs/heal.md``. Each program's gradient is held against the one that it has
without the write, so a cell says what was computed and not only that nothing was raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.dlpack
from torch.autograd.graph import allow_mutation_on_saved_tensors

import gradsan


def _in_thread(write: Callable[[Any], Any]) -> Callable[[Any], None]:
    def run(tensor: Any) -> None:
        thread = threading.Thread(target=write, args=(tensor,))
        thread.start()
        thread.join()

    return run


WRITES: dict[str, Callable[[Any], Any]] = {
    "`t.mul_(0)` under `no_grad`": lambda t: t.mul_(0),
    "`t[1:].zero_()`": lambda t: t[1:].zero_(),
    "`t.data.mul_(0)`": lambda t: t.data.mul_(0),
    "`t.data.mul_(0)`, then `t.mul_(0)`": lambda t: (t.data.mul_(0), t.mul_(0)),
    "`t.detach().numpy()[1] = 7`": lambda t: t.detach().numpy().__setitem__(1, 7.0),
    "`torch.from_dlpack(t.detach()).add_(1)`": lambda t: torch.utils.dlpack.from_dlpack(t.detach()).add_(1),
    "`t.untyped_storage().fill_(0)`": lambda t: t.untyped_storage().fill_(0),
    "`torch.add(…, out=t)`": lambda t: torch.add(torch.ones(3), 1, out=t.detach()),
    "`torch.sort(…, out=(t, indices))`": lambda t: torch.sort(
        torch.tensor([3.0, 1.0, 2.0]), out=(t.detach(), torch.empty(3, dtype=torch.long))
    ),
    "`torch._foreach_add_([t], 1)`": lambda t: torch._foreach_add_([t.detach()], 1.0),
    "`t.mul_(0)` in another thread": _in_thread(lambda t: t.detach().mul_(0)),
}
SAVES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda t: (t * t).sum(),
    "view at an offset": lambda t: (t[1:] * t[1:]).sum(),
}


def outcome(
    save: Callable[[Any], Any], write: Callable[[Any], Any] | None, context: AbstractContextManager[Any], inside: bool
) -> Any:
    """Give the gradient of one program, or the type of what it raised. ``inside``: backward runs in the context."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    try:
        with context:
            t = x * 1.5
            loss = save(t)
            if write is not None:
                with torch.no_grad():
                    write(t)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    except Exception as error:
        return type(error).__name__
    return x.grad


def cell(result: Any, right: Any) -> str:
    """Put an outcome in a word."""
    if isinstance(result, str):
        return f"raises {result}"
    return "right" if torch.equal(result, right) else "**wrong gradient**"


def main() -> None:
    """Print the page."""
    print("# Healing, and `allow_mutation_on_saved_tensors`\n")
    print('`gradsan run --heal train.py`, or `with gradsan.watch(mode="heal"):`, keeps each saved tensor as it was and')
    print("gives backward the original. Every healed conflict is reported.", end=" ")
    print("What may be healed, and how much memory that")
    print("may take, is said by `--heal-only` and `--max-bytes`:", end=" ")
    print("[Stopping, and healing within bounds](how-to/stop-or-heal.md).")
    print("\nTorch has a context of its own for counted writes. Side by side, each gradient")
    print(
        f"held against that of the program without the write "
        f"(written by `tools/compare_heal.py`, torch {torch.__version__}):\n"
    )
    print("<!-- comparison:start -->")
    print("| write between save and backward | saved | plain | `allow_mutation_on_saved_tensors` | gradsan heal |")
    print("|---|---|---|---|---|")
    for saved, save in SAVES.items():
        right = outcome(save, None, nullcontext(), True)
        for name, write in WRITES.items():
            print(_row(name, saved, save, write, right, True))
        name = "`t.mul_(0)`, backward after the context"
        print(_row(name, saved, save, WRITES["`t.mul_(0)` under `no_grad`"], right, False))
    print("<!-- comparison:end -->")


def _row(name: str, saved: str, save: Any, write: Any, right: Any, inside: bool) -> str:
    contexts = (nullcontext(), allow_mutation_on_saved_tensors(), gradsan.watch(mode="heal"))
    cells = [cell(outcome(save, write, context, inside), right) for context in contexts]
    return f"| {name} | {saved} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
