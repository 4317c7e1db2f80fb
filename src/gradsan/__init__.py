"""gradsan: a gradient sanitizer for PyTorch.

``with gradsan.watch() as w:`` watches a block, ``gradsan.enable()`` … ``gradsan.disable()`` a stretch of a program.
Importing this package imports no torch.
"""

from __future__ import annotations

__version__ = "0.1.0"

from gradsan._api import disable, enable, heal, watch

__all__ = ["__version__", "disable", "enable", "heal", "watch"]
