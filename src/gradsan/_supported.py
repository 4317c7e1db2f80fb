"""Oldest PyTorch that gradsan watches."""

from __future__ import annotations

import re
import sys

from gradsan.model import Message

OLDEST_TORCH = (2, 6)


def too_old() -> Message | None:
    """What is to be said where the PyTorch of this process is older; None where it is not, or is not imported yet."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST_TORCH:
        return None
    return Message("blind.torch_too_old", {"version": version, "oldest": ".".join(map(str, OLDEST_TORCH))})
