"""Fixes that have been tried: candidates are laid over the program, run in processes of their own, and compared.

The parent (:func:`find_fixes`) imports no torch; each run of the program is a child process (``_child.py``), which
watches or heals it, records its gradients, and hands back plain data.
"""

from gradsan.repair.libraries import why_untried
from gradsan.repair.patch import Patch, apply_patch, dirty_files
from gradsan.repair.ranking import is_implied
from gradsan.repair.search import Found, Limits, find_fixes, runs_well

__all__ = [
    "Found",
    "Limits",
    "Patch",
    "apply_patch",
    "dirty_files",
    "find_fixes",
    "is_implied",
    "runs_well",
    "why_untried",
]
