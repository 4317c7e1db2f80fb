"""Search for tested fixes: candidate patches are run in processes of their own, and their gradients compared.

The parent (:func:`find_fixes`) imports no torch; each run of the program is a child process (``_child.py``), which
watches or heals it, records its gradients, and returns plain data. Names are imported on first use: a
report asks ``repair.fixes`` for lines, and runs no trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradsan._lazy import names_on_demand

if TYPE_CHECKING:
    from gradsan.repair.libraries import why_untried
    from gradsan.repair.patch import Patch, apply_patch, dirty_files
    from gradsan.repair.ranking import is_implied
    from gradsan.repair.search import Found, Limits, find_fixes, runs_well

__getattr__ = names_on_demand(
    __name__,
    {
        "ranking": ("is_implied",),
        "libraries": ("why_untried",),
        "patch": ("Patch", "apply_patch", "dirty_files"),
        "search": ("Found", "Limits", "find_fixes", "runs_well"),
    },
)

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
