"""The modules and optimizers of the program that are alive, reached by a variable or not."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def modules_alive(wanted: Callable[[type], bool] = lambda _: True) -> list[nn.Module]:
    """The live modules of those classes, torch's own left out, for which ``wanted`` holds."""
    kinds = {one for one in _kinds_below(nn.Module) if not one.__module__.startswith("torch.") and wanted(one)}
    # By its type: an object may have a ``__class__`` of its own. Without such a class nothing needs to be gone through.
    return [one for one in gc.get_objects() if type(one) in kinds] if kinds else []


def optimizers_alive() -> list[Optimizer]:
    """The live optimizers."""
    kinds = _kinds_below(Optimizer)
    return [one for one in gc.get_objects() if type(one) in kinds and hasattr(one, "param_groups")]


def _kinds_below(kind: Any) -> set[Any]:
    found: set[Any] = set()
    waiting = [kind]
    while waiting:
        inner = [one for one in type.__subclasses__(waiting.pop()) if one not in found]
        found.update(inner)
        waiting += inner
    return found
