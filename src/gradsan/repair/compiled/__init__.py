"""Compiled code compared with eager code: whole programs by their losses and gradients, then graph by graph."""

from gradsan.repair.compiled.judging import Compared
from gradsan.repair.compiled.search import CompareLimits, compare_program

__all__ = ["CompareLimits", "Compared", "compare_program"]
