"""Raw stacks, and how many entries the logs of a core keep; the C core has the same numbers."""

from __future__ import annotations

from types import CodeType

WRITES_KEPT = 32_768
NODES_KEPT = 1_048_576
STACKS_KEPT = 65_536
DEPTH_KEPT = 128
STEPS_KEPT = 1024  # beginnings and ends, each one
BACKWARDS_KEPT = 256
QUIET_NODES = 1024
"""The number of Nodes after the last backward at which ``on_quiet`` is first called."""


class RawStack:
    """The code objects and instruction offsets of a call, innermost first, as a core collects them.

    Frames would keep tensors alive. The C core has a class of its own with the same attributes;
    :mod:`gradsan.record.stacks` makes sites of both.
    """

    __slots__ = ("_rounds", "codes", "lastis")

    def __init__(self, codes: tuple[CodeType, ...], lastis: tuple[int, ...]) -> None:
        """Keep the code objects and, for each, ``f_lasti`` at the moment of capture."""
        self.codes = codes
        self.lastis = lastis
        self._rounds = 0
